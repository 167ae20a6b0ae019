"""Trace ids in log lines: of the step that a thread works on, or of the call that it handles."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry import trace

from dsa_indexer.v1 import indexer_pb2 as pb

_step: ContextVar[pb.TraceContext | None] = ContextVar("step", default=None)


@contextmanager
def log_lines_of(context: pb.TraceContext) -> Iterator[None]:
    """Lines that this thread logs inside carry the ids of a step; of one that is traced."""
    if not context.trace_id:
        yield
        return
    token = _step.set(context)
    try:
        yield
    finally:
        _step.reset(token)


class TraceIds(logging.Filter):
    """For a handler: gives each record `trace_id` and `span_id`, hexadecimal or empty, and
    `trace`, which is empty or all of it, to stand behind the message.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        trace_id, span_id = _ids()
        both = f" trace_id={trace_id} span_id={span_id}" if trace_id else ""
        record.__dict__ |= {"trace_id": trace_id, "span_id": span_id, "trace": both}
        return True


def _ids() -> tuple[str, str]:
    if (step := _step.get()) is not None:
        return step.trace_id.hex(), step.span_id.hex()
    call = trace.get_current_span().get_span_context()
    if not call.is_valid:
        return "", ""
    return trace.format_trace_id(call.trace_id), trace.format_span_id(call.span_id)
