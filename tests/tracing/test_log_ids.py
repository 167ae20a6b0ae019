"""Log lines lead to the trace of the step or call that they are about."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer_cli.serve import LINE
from ipc_handoff.telemetry.log_ids import TraceIds, log_lines_of
from ipc_handoff.telemetry.settings import TraceSettings
from ipc_handoff.telemetry.tracing import Tracing
from tests.support.plants import pair
from tests.support.traces import attended_step, traced
from tests.support.waiting import eventually

STEP = pb.TraceContext(trace_id=bytes(range(16)), span_id=bytes(range(8)))
IDS = f" trace_id={STEP.trace_id.hex()} span_id={STEP.span_id.hex()}"
logger = logging.getLogger("tests.log_ids")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    ids = TraceIds()
    caplog.handler.addFilter(ids)
    yield caplog
    caplog.handler.removeFilter(ids)


def traces_of(lines: pytest.LogCaptureFixture, text: str) -> set[str]:
    return {vars(r)["trace"] for r in lines.records if text in r.getMessage()}


def test_lines_inside_of_a_step_carry_its_ids_and_others_none(
    lines: pytest.LogCaptureFixture,
) -> None:
    logger.warning("before")
    with log_lines_of(STEP):
        logger.warning("inside")
        with log_lines_of(pb.TraceContext()):
            logger.warning("of no trace")
    logger.warning("behind")
    assert [vars(record)["trace"] for record in lines.records] == ["", IDS, IDS, ""]
    assert vars(lines.records[1])["trace_id"] == STEP.trace_id.hex()


def test_the_services_lines_end_with_the_ids(lines: pytest.LogCaptureFixture) -> None:
    with log_lines_of(STEP):
        logger.warning("something")
    assert logging.Formatter(LINE).format(lines.records[0]).endswith(f": something{IDS}")


def test_lines_inside_of_a_call_carry_its_ids(lines: pytest.LogCaptureFixture) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(TraceSettings("x"), [exporter])
    with tracing.server_call("Method", {}):
        logger.warning("inside")
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert f"trace_id={span.context.trace_id:032x}" in vars(lines.records[0])["trace"]


def test_what_the_service_logs_of_a_step_leads_to_its_trace(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    with traced(tmp_path) as (running, _):
        attended_step(running)
        running.engine.fail = True
        trace = attended_step(running)
        assert eventually(lambda: bool(traces_of(lines, "the engine failed")))
    (ids,) = traces_of(lines, "the engine failed")
    assert f"trace_id={trace} " in ids


def test_what_the_worker_logs_of_a_step_leads_to_its_trace(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    with traced(tmp_path) as (running, _), running.stalled():
        trace = attended_step(running)
    (ids,) = traces_of(lines, "detached, working inline")
    assert f"trace_id={trace} " in ids


def test_without_tracing_lines_carry_nothing(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    with pair(tmp_path) as running:
        running.engine.fail = True
        running.step()
        assert eventually(lambda: bool(traces_of(lines, "the engine failed")))
    assert {vars(record)["trace"] for record in lines.records} == {""}
