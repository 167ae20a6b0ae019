"""What a session makes of reports: also of refusals, of rows with faults, and of nonsense."""

import logging
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import InvalidRequest, Source, Statistics
from indexer_client import reports as reports_module
from indexer_client.reports import ReportReader
from indexer_client.step_findings import WorkerFindings
from indexer_service import step_executor
from indexer_service.errors import invalid
from ipc_handoff.detectors import NO_DETECTION
from ipc_handoff.ring import RingConsumer, RingProducer
from tests.support.plants import Pair, pair
from tests.support.waiting import SOON


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReportReader]:
    monkeypatch.setattr(reports_module, "_QUIET_SECONDS", 0.0)
    yield ReportReader(Statistics(), WorkerFindings(NO_DETECTION, ()))


def _reports_area(running: Pair) -> memoryview:
    attachment = running.session._attachment
    assert attachment is not None
    return attachment.bank.control._area("reports")


def _lap(running: Pair) -> None:
    area = _reports_area(running)
    slot = running.session.geometry.control.report_slot
    for offset in range(0, len(area), slot):
        area[offset : offset + 8] = struct.pack("<Q", 1 << 40)


def _garble(running: Pair) -> None:
    """The checksum holds, but the payload is no report."""
    attachment = running.session._attachment
    assert attachment is not None
    consumer = attachment.bank.control.reports
    assert isinstance(consumer, RingConsumer)
    control, layout = attachment.bank.control, running.session.geometry.control
    producer = RingProducer(
        _reports_area(running), control._area("reports_consumed"), layout.report_slot
    )
    producer._posted = consumer._taken
    producer.post(b"\xff\xff\xff")


@pytest.mark.parametrize("spoil", [_lap, _garble], ids=["lapped", "garbled"])
def test_a_corrupt_report_ring_detaches_and_the_forward_goes_on(
    spoil: object, tmp_path: Path
) -> None:
    with pair(tmp_path) as running:
        assert set(running.step()) == {Source.SERVICE}
        case = running.case()
        with running.session.step(case.inputs, case.layers) as step:
            running.checker.run(step, case)
            spoil(running)  # type: ignore[operator]
        attachment = running.session._attachment
        assert attachment is not None
        assert attachment.detached_because.startswith("report ring: ")
        running.step()
        running.session.wait_attached(SOON)
        assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()
        assert running.session.statistics.detachments == 1


def test_plans_that_are_all_refused_are_told_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise invalid("plan.rows", "too odd", "another")

    with pair(tmp_path) as running:
        assert running.session.last_error is None
        monkeypatch.setattr(step_executor, "check_plan", refuse)
        for _ in range(4):
            assert set(running.step()) == {Source.INLINE}
        assert running.session.statistics.rejected_steps >= 3
        error = running.session.last_error
        assert isinstance(error, InvalidRequest)
        assert str(error) == "plan.rows: too odd (fix: another)"
        told = [line for line in caplog.messages if "plan.rows: too odd" in line]
        assert len(told) == 1
        monkeypatch.undo()
        for _ in range(2):
            assert set(running.step()) == {Source.SERVICE}
        assert running.session.last_error is None
        running.checker.assert_right()


def test_another_message_is_told_too_but_not_at_once(
    reader: ReportReader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(message: str) -> pb.StepReport:
        return pb.StepReport(step=1, status=pb.STEP_STATUS_REJECTED, code=3, message=message)

    for message in ("a", "b", "a", "b"):
        reader.read(refused(message))
    assert len(caplog.records) == 2
    monkeypatch.setattr(reports_module, "_QUIET_SECONDS", 60.0)
    for number in range(100):
        reader.read(refused(str(number)))
    assert len(caplog.records) == 3
    assert reader.last_error is not None and str(reader.last_error) == "99"
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_numbers_that_nobody_defined_raise_nothing(reader: ReportReader) -> None:
    report = pb.StepReport.FromString(
        pb.StepReport(
            status=pb.STEP_STATUS_REJECTED, code=4_000_000_000, message="odd"
        ).SerializeToString()
    )
    report.faults.add(reason=77)  # type: ignore[arg-type]
    reader.read(report)
    assert str(reader.last_error) == "odd"
