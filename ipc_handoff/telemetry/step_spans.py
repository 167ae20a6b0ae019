"""Spans of steps, made when a step is over: their ids and times are given, not taken."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler, SamplingResult

from ipc_handoff.stages import PREFIX


class GivenIds(IdGenerator):
    """Random ids, but for the span that a thread has given ids."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self._given = threading.local()

    def generate_span_id(self) -> int:
        return getattr(self._given, "span", 0) or self._random.generate_span_id()

    def generate_trace_id(self) -> int:
        return getattr(self._given, "trace", 0) or self._random.generate_trace_id()

    @contextmanager
    def given(self, trace: int, span: int) -> Iterator[None]:
        """The span that this thread starts inside has these ids."""
        self._given.trace, self._given.span = trace, span
        try:
            yield
        finally:
            self._given.trace = self._given.span = 0


class StepsAreDecided(Sampler):
    """Spans of steps exist only for steps that are kept; about others `inner` decides."""

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner

    def should_sample(
        self, parent_context: Context | None, trace_id: int, name: str, *args: Any, **kwargs: Any
    ) -> SamplingResult:
        chosen = ALWAYS_ON if name.startswith(PREFIX) else self._inner
        return chosen.should_sample(parent_context, trace_id, name, *args, **kwargs)

    def get_description(self) -> str:
        return f"StepsAreDecided({self._inner.get_description()})"
