"""The control block: what is checked at the start, and what a start resets."""

from dataclasses import replace

import pytest

from ipc_handoff import control
from ipc_handoff.control import ServiceControl, WorkerControl
from ipc_handoff.errors import LayoutMismatch
from ipc_handoff.layout import LAYOUT_VERSION
from tests.ipc_handoff.support import GEOMETRY

EPOCH = 11


def started(size: int = GEOMETRY.control.size) -> tuple[memoryview, WorkerControl]:
    memory = memoryview(bytearray(size))
    worker = WorkerControl(memory, GEOMETRY)
    worker.start(EPOCH)
    return memory, worker


def test_plans_go_one_way_and_reports_the_other() -> None:
    memory, worker = started()
    service = ServiceControl(memory, GEOMETRY, EPOCH)
    worker.plans.post(b"plan")
    service.reports.post(b"report")
    assert service.plans.take() == b"plan"
    assert worker.reports.take() == b"report"
    assert service.plans.take() is None
    assert worker.reports.take() is None


def test_stamps_of_the_service_are_read_by_the_worker() -> None:
    memory, worker = started()
    service = ServiceControl(memory, GEOMETRY, EPOCH)
    service.service_stamps.begin(3)
    service.service_stamps.stamp(3, 2, 4, 99)
    times = worker.service_stamps.read(3)
    assert times is not None
    assert times[2][4] == 99


def header_with(word: int, value: int) -> memoryview:
    memory, _ = started()
    memory[word * 8 : word * 8 + 8] = value.to_bytes(8, "little")
    return memory


@pytest.mark.parametrize("word", range(4), ids=["magic", "version", "fingerprint", "epoch"])
def test_a_header_with_another(word: int) -> None:
    found = int.from_bytes(started()[0][word * 8 : word * 8 + 8], "little")
    for value in (found ^ 1, 0):
        with pytest.raises(LayoutMismatch, match="fix: the same dsa-indexer version"):
            ServiceControl(header_with(word, value), GEOMETRY, EPOCH)
    ServiceControl(header_with(word, found), GEOMETRY, EPOCH)


def test_a_service_of_another_geometry_epoch_or_version_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, _ = started()
    with pytest.raises(LayoutMismatch):
        ServiceControl(memory, replace(GEOMETRY, top_k=63), EPOCH)
    with pytest.raises(LayoutMismatch):
        ServiceControl(memory, GEOMETRY, EPOCH + 1)
    monkeypatch.setattr(control, "LAYOUT_VERSION", LAYOUT_VERSION + 1)
    with pytest.raises(LayoutMismatch):
        ServiceControl(memory, GEOMETRY, EPOCH)


def test_memory_that_was_never_started_is_refused() -> None:
    with pytest.raises(LayoutMismatch):
        ServiceControl(memoryview(bytearray(GEOMETRY.control.size)), GEOMETRY, EPOCH)


@pytest.mark.parametrize("side", ["worker", "service"])
def test_memory_shorter_than_the_layout_is_refused(side: str) -> None:
    memory = started()[0][:-1]
    with pytest.raises(LayoutMismatch, match="the layout needs"):
        if side == "worker":
            WorkerControl(memory, GEOMETRY)
        else:
            ServiceControl(memory, GEOMETRY, EPOCH)


def use(memory: memoryview, worker: WorkerControl) -> None:
    """Leave something in every area."""
    service = ServiceControl(memory, GEOMETRY, EPOCH)
    worker.plans.post(b"plan")
    service.plans.take()
    service.reports.post(b"report")
    worker.reports.take()
    worker.bells.publish(5)
    worker.bells.request(1, 5)
    worker.bells.detach()
    worker.bells.keep(5)
    worker.generations.inputs.begin(5)
    worker.generations.layers.begin(5, 1)
    service.generations.answers.begin(5, 1)
    service.bells.advance()
    service.bells.done(1, 5)
    service.bells.cancel(5)
    service.bells.exported(5)
    service.bells.keep(5)
    service.bells.drained()
    service.service_stamps.begin(5)
    service.service_stamps.stamp(5, 0, 0)


def test_a_start_leaves_nothing_of_the_attachment_before() -> None:
    memory, worker = started()
    fresh = bytes(memory)
    use(memory, worker)
    used = {area.name for area in GEOMETRY.control.areas.values() if any(area.of(memory))}
    assert used == set(GEOMETRY.control.areas)
    worker.start(EPOCH)
    assert bytes(memory) == fresh
    worker.start(EPOCH + 1)
    service = ServiceControl(memory, GEOMETRY, EPOCH + 1)
    worker.plans.post(b"first of the new attachment")
    assert service.plans.take() == b"first of the new attachment"
    assert not worker.bells.is_drained()
    assert not worker.bells.is_done(1, 5)


def test_planted_start_without_reset_shows_old_answers() -> None:
    memory, worker = started()
    use(memory, worker)
    header = memory[:32]
    header[24:32] = (EPOCH + 1).to_bytes(8, "little")
    ServiceControl(memory, GEOMETRY, EPOCH + 1)
    assert worker.bells.is_done(1, 5)
    assert worker.bells.is_drained()
