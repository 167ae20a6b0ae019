"""Who writes which word, and what is compared how."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from ipc_handoff.doorbells import ServiceBells, WorkerBells
from ipc_handoff.layout import CACHE_LINE, STAMPED_STEPS
from ipc_handoff.words import WORD_BYTES
from tests.ipc_handoff.support import GEOMETRY

LAYOUT = GEOMETRY.control
LAYERS = len(GEOMETRY.layers)

# What each method may change: the area's name and the word in it; None: nothing at all.
Written = tuple[str, int] | None
WORKER: dict[str, tuple[tuple[int, ...], Written]] = {
    "publish": ((9,), ("published", 0)),
    "request": ((1, 9), ("requests", 1)),
    "detach": ((), ("detached", 0)),
    "is_done": ((1, 9), None),
    "is_cancelled": ((9,), None),
    "progress": ((), None),
    "is_drained": ((), None),
    "is_exported": ((9,), None),
    "keep": ((9,), ("worker_kept", 9)),
    "is_kept": ((9,), None),
}
SERVICE: dict[str, tuple[tuple[int, ...], Written]] = {
    "published": ((), None),
    "requested": ((1,), None),
    "is_detached": ((), None),
    "advance": ((), ("progress", 0)),
    "done": ((1, 9), ("dones", 1)),
    "cancel": ((9,), ("cancelled", 0)),
    "drained": ((), ("drained", 0)),
    "exported": ((9,), ("exported", 9)),
    "keep": ((9,), ("service_kept", 9)),
    "is_kept": ((9,), None),
}
WORKERS_AREAS = {"published", "requests", "detached", "worker_kept"}
SERVICES_AREAS = {"progress", "dones", "cancelled", "drained", "exported", "service_kept"}

# A word a step.
PACKED = {"exported", "worker_kept", "service_kept"}


def public_methods(bells: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(bells, callable) if not name.startswith("_")}


def changed_bytes(
    bells: Callable[..., Any], method: str, arguments: tuple[int, ...], fill: int
) -> set[int]:
    """Offsets of the control block that a call changed, whatever stood there."""
    control = bytearray([fill]) * LAYOUT.size
    before = bytes(control)
    getattr(bells(memoryview(control), LAYOUT), method)(*arguments)
    return {offset for offset, byte in enumerate(control) if byte != before[offset]}


def outside_of_its_word(bells: Callable[..., Any], method: str, entry: Any) -> set[int]:
    """Offsets that the method changed though the table says that it does not own them."""
    arguments, written = entry
    allowed: set[int] = set()
    if written is not None:
        area, index = written
        stride = WORD_BYTES if area in PACKED else CACHE_LINE
        start = LAYOUT.areas[area].offset + index * stride
        allowed = set(range(start, start + 8))
    changed = set[int]()
    for fill in (0x00, 0xFF):
        changed |= changed_bytes(bells, method, arguments, fill)
    assert bool(changed) == (written is not None), f"{method} changes nothing"
    return changed - allowed


@pytest.mark.parametrize(("bells", "table"), [(WorkerBells, WORKER), (ServiceBells, SERVICE)])
def test_every_method_is_in_the_ownership_table(bells: type, table: dict[str, Any]) -> None:
    assert public_methods(bells) == set(table)


@pytest.mark.parametrize("method", WORKER)
def test_worker_writes_its_own_word_only(method: str) -> None:
    assert outside_of_its_word(WorkerBells, method, WORKER[method]) == set()


@pytest.mark.parametrize("method", SERVICE)
def test_service_writes_its_own_word_only(method: str) -> None:
    assert outside_of_its_word(ServiceBells, method, SERVICE[method]) == set()


def test_every_word_has_one_side_that_writes_it() -> None:
    worker = {written[0] for _, written in WORKER.values() if written}
    service = {written[0] for _, written in SERVICE.values() if written}
    assert worker == WORKERS_AREAS
    assert service == SERVICES_AREAS


class WritesTheWorkersWord(ServiceBells):
    def done(self, layer: int, step: int) -> None:
        self._requests.store(step, layer)


class WritesTwoWords(WorkerBells):
    def publish(self, step: int) -> None:
        super().publish(step)
        self._progress.store(0)


def test_planted_writers_of_others_words_are_seen() -> None:
    assert outside_of_its_word(WritesTheWorkersWord, "done", SERVICE["done"])
    assert outside_of_its_word(WritesTwoWords, "publish", WORKER["publish"])


def test_words_of_all_bells_and_layers_are_on_cache_lines_of_their_own() -> None:
    """Told by the bytes that change, not by the layout."""
    lines: list[int] = []
    for bells, calls in (
        (WorkerBells, [("publish", (9,)), ("detach", ())]),
        (WorkerBells, [("request", (layer, 9)) for layer in range(LAYERS)]),
        (ServiceBells, [("advance", ()), ("cancel", (9,)), ("exported", (9,)), ("drained", ())]),
        (ServiceBells, [("done", (layer, 9)) for layer in range(LAYERS)]),
    ):
        make: Any = bells
        for method, arguments in calls:
            changed = changed_bytes(make, method, arguments, 0)
            lines.append(min(changed) // CACHE_LINE)
            assert max(changed) // CACHE_LINE == lines[-1]
    assert len(set(lines)) == len(lines)


@pytest.fixture
def both() -> tuple[WorkerBells, ServiceBells]:
    control = memoryview(bytearray(LAYOUT.size))
    return WorkerBells(control, LAYOUT), ServiceBells(control, LAYOUT)


def test_what_one_side_rings_the_other_reads(both: tuple[WorkerBells, ServiceBells]) -> None:
    worker, service = both
    worker.publish(2**64 - 1)
    assert service.published() == 2**64 - 1
    for layer in range(LAYERS):
        worker.request(layer, 10 + layer)
        service.done(layer, 20 + layer)
    assert [service.requested(layer) for layer in range(LAYERS)] == [10, 11, 12]
    assert [worker.is_done(layer, 20 + layer) for layer in range(LAYERS)] == [True] * LAYERS
    assert not service.is_detached()
    worker.detach()
    assert service.is_detached()
    assert worker.progress() == 0
    service.advance()
    assert worker.progress() == 1
    service.cancel(7)
    assert worker.is_cancelled(7)
    assert not worker.is_drained()
    service.drained()
    assert worker.is_drained()


def test_a_service_that_has_drained_stores_nothing_more(
    both: tuple[WorkerBells, ServiceBells],
) -> None:
    """Its telemetry may be late, and the bank may already be another service's."""
    worker, service = both
    service.exported(6)
    service.keep(6)
    service.drained()
    service.exported(7)
    service.keep(7)
    assert worker.is_exported(6) and worker.is_kept(6)
    assert not worker.is_exported(7) and not worker.is_kept(7)


def test_either_side_keeps_a_step_and_the_other_one_sees_it(
    both: tuple[WorkerBells, ServiceBells],
) -> None:
    """Each in words of its own: what one wants says nothing of the other."""
    worker, service = both
    worker.keep(5)
    assert service.is_kept(5) and not worker.is_kept(5)
    service.keep(6)
    assert worker.is_kept(6) and not service.is_kept(6)
    assert not worker.is_exported(5)


def test_words_of_traces_are_of_one_step_and_not_of_the_one_a_lap_later(
    both: tuple[WorkerBells, ServiceBells],
) -> None:
    worker, service = both
    worker.keep(5)
    assert not service.is_kept(5 + STAMPED_STEPS)
    worker.keep(5 + STAMPED_STEPS)
    assert not service.is_kept(5)


class AtLeast(WorkerBells):
    """Planted: takes the answer of any later step for this one's."""

    def is_done(self, layer: int, step: int) -> bool:
        return self._dones.load(layer) >= step

    def is_cancelled(self, step: int) -> bool:
        return self._cancelled.load() >= step


def wrongly_done(worker: WorkerBells, service: ServiceBells) -> list[int]:
    """Steps around the one rung that count as done or cancelled though they are not."""
    service.done(0, 100)
    service.cancel(100)
    around = [0, 1, 99, 101, 2**64 - 1]
    return [step for step in around if worker.is_done(0, step) or worker.is_cancelled(step)]


def test_an_answer_is_of_exactly_one_step() -> None:
    control = memoryview(bytearray(LAYOUT.size))
    service = ServiceBells(control, LAYOUT)
    assert wrongly_done(WorkerBells(control, LAYOUT), service) == []
    assert wrongly_done(AtLeast(control, LAYOUT), service) != []


def test_an_answer_is_of_exactly_one_layer(both: tuple[WorkerBells, ServiceBells]) -> None:
    worker, service = both
    service.done(1, 5)
    assert [worker.is_done(layer, 5) for layer in range(LAYERS)] == [False, True, False]


@pytest.mark.parametrize("layer", [LAYERS, LAYERS + 1])
def test_a_layer_that_does_not_exist_has_no_word(
    layer: int, both: tuple[WorkerBells, ServiceBells]
) -> None:
    worker, service = both
    with pytest.raises(IndexError):
        worker.request(layer, 1)
    with pytest.raises(IndexError):
        service.done(layer, 1)


def test_no_bell_is_rung_in_fresh_memory(both: tuple[WorkerBells, ServiceBells]) -> None:
    worker, service = both
    assert not any(worker.is_done(layer, 1) for layer in range(LAYERS))
    assert not worker.is_cancelled(1)
    assert not worker.is_drained()
    assert not service.is_detached()
    assert service.published() == worker.progress() == 0
