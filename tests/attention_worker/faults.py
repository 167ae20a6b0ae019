"""What happens to a worker when its service is ended, or held up, at every place of a step.

One worker with one CUDA context and one graph lives through all cases. Every step has data of its
own, every selection is compared with one that was computed apart, and banks are poisoned before
each case.
"""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from attention_worker.device_session import DeviceIndexer
from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.banks import ANSWERS, STAGING
from ipc_handoff.regions import TensorSpec
from tests.attention_worker.gpu_steps import GpuCase, GpuSteps, wrong
from tests.attention_worker.gpu_worker import Captured
from tests.attention_worker.pauses import Place
from tests.attention_worker.services import READY_SECONDS, Services

REQUESTS = 8
POISON = 0xAB
LEASE_SECONDS, GATE_SECONDS = 1.0, 1.5
"""Of the services: a lease ends while a gate still waits."""
PAUSE_SECONDS, LATE_SECONDS = 0.012, 0.06
"""Shorter and longer than a worker waits."""
_INTO_A_PAUSE = 0.006
_AFTER = 4
"""Steps without a service, and with its successor."""

PLACES = {"behind the gate": Place.BEHIND_GATE, "behind the scores": Place.BEHIND_SCORES}
"""Where in a step the service stays for a while."""


def poison(indexer: DeviceIndexer) -> None:
    """Fill all free banks: what was never written must not look like an answer."""
    for bank in list(indexer._caretaker._pool._free):
        for name in (STAGING, ANSWERS):
            memory = bank.memories[name]
            spec = TensorSpec((memory.byte_size,), torch.uint8)
            memory.tensor(0, memory.byte_size, spec, name).fill_(POISON)
    torch.cuda.synchronize()


class Forward(Captured):
    """One FULL graph: each layer inserts the step's keys, and selects."""

    def __init__(self, indexer: DeviceIndexer, steps: GpuSteps, requests: int) -> None:
        geometry, kind = steps.geometry, {"device": steps.device}
        self._session = indexer
        self._keys = {
            layer: torch.zeros((requests, geometry.head_dim), dtype=torch.bfloat16, **kind)
            for layer in geometry.layers
        }
        self._slots = torch.full((requests,), -1, dtype=torch.int64, **kind)
        super().__init__(indexer, steps, requests, 1)

    def _forward(self) -> None:
        for layer, q in self.q.items():
            self._session.insert(self._keys[layer], self._slots, layer)
            self._session.select(layer, q, self.weights[layer], self.out[layer])

    def replay(self, case: GpuCase) -> None:
        self._slots.fill_(-1)
        self._slots[: len(case.slots)].copy_(case.slots)
        for layer, keys in case.keys.items():
            self._keys[layer][: len(keys)].copy_(keys)
        super().replay(case)


@dataclass
class Worker:
    """Args:
    steps: with K caches of its own, which get the same keys.

    Attributes:
    wrong: a line for every selection that was not as expected.
    times: ms of each step, from its launch to its end.
    answered: layers of each step that the service answered.
    """

    indexer: DeviceIndexer
    steps: GpuSteps
    services: Services
    captured: Forward
    wrong: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    _number: int = 0

    def step(
        self,
        *,
        gated: Callable[[], None] = lambda: None,
        running: Callable[[], None] = lambda: None,
        between: Callable[[], None] | None = None,
        prefill: bool = False,
    ) -> None:
        """One step of new data.

        Args:
            gated: called when it is published, and the service waits for its first layer.
            running: called in another thread while it is launched and runs.
            between: called behind the first layer. The step is eager then, also with `prefill`.
        """
        self._number += 1
        before = self.indexer.statistics.answered_layers
        if prefill:
            case = self.steps.case(self._number, 2, prefill=(17, 60))
        else:
            case = self.steps.case(self._number, 1 + self._number % REQUESTS)
        self.indexer.begin_step(case.inputs)
        torch.cuda.synchronize()
        gated()
        beside = threading.Thread(target=running)
        beside.start()
        began = time.perf_counter()
        if prefill or between is not None:
            found = self._eager(case, between)
            torch.cuda.synchronize()
            bad = wrong(case, found)
        else:
            self.captured.replay(case)
            torch.cuda.synchronize()
            bad = self.captured.wrong(case)
        self.times.append((time.perf_counter() - began) * 1e3)
        self.wrong += [f"step {self.indexer._steps}, {line}" for line in bad]
        beside.join()
        self.answered.append(self.indexer.statistics.answered_layers - before)

    def _eager(self, case: GpuCase, between: Callable[[], None] | None) -> dict[int, torch.Tensor]:
        found = {}
        for layer, q in case.q.items():
            out = torch.full_like(case.expected[layer], -2)
            self.indexer.insert(case.keys[layer], case.slots, layer)
            self.indexer.select(layer, q, case.weights[layer], out)
            found[layer] = out
            if between is not None:
                torch.cuda.synchronize()
                between()
                between = None
        return found

    def many(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def attach(self) -> float:
        """Wait for the service; the seconds that it took from when it serves."""
        began = time.monotonic()
        self.indexer.wait_attached(READY_SECONDS)
        return round(time.monotonic() - began, 3)


def _told(worker: Worker, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a case says, with what is asked of every one."""
    statistics, first = worker.indexer.statistics, len(worker.times)
    worker.wrong.clear()
    poison(worker.indexer)
    told = run()
    after = worker.indexer.statistics
    return told | {
        "wrong": worker.wrong[:5],
        "attachments": after.attachments - statistics.attachments,
        "detachments": after.detachments - statistics.detachments,
        "cancelled": after.cancelled_steps - statistics.cancelled_steps,
        "steps": len(worker.times) - first,
        "last answered": worker.answered[-1],
    }


def _bound_ms(worker: Worker, first: int) -> float:
    """What steps from `first` on took beyond as many inline ones, ms: the last ones are inline."""
    taken = worker.times[first:]
    return round(sum(taken) - len(taken) * median(taken[-_AFTER:]), 1)


def ended(worker: Worker, number: signal.Signals, place: str, *, thaw: bool) -> dict[str, Any]:
    """The service is killed, or stopped, at a place; a successor comes; what stopped is thawed."""
    services = worker.services
    old = services.serving

    def end() -> None:
        services.send(number)

    def end_soon() -> None:
        time.sleep(_INTO_A_PAUSE)
        end()

    before = len(worker.times)
    if place == "idle":
        end()
        if number == signal.SIGUSR1:
            while old.poll() is None:  # it goes on for a moment
                worker.step()
            before = len(worker.times)
        worker.step()
    elif place == "gated":
        worker.step(gated=end)
    else:
        with services.pauses.at(PLACES.get(place, Place.BEHIND_GATE), PAUSE_SECONDS):
            worker.step(running=end_soon, prefill=place == "prefill")
    at_the_fault = worker.answered[-1]
    worker.many(_AFTER + 1)
    bound = _bound_ms(worker, before)
    inline = worker.answered[-_AFTER:]
    services.start()
    services.wait_until_it_serves()
    attached = worker.attach()
    worker.many(_AFTER)
    remote = worker.answered[-1]
    if thaw:
        old.send_signal(signal.SIGCONT)
        for _ in range(3 * _AFTER):
            worker.step()
            time.sleep(0.01)
    return {
        "answered at the fault": at_the_fault, "inline": inline, "remote": remote,
        "bound ms": bound, "seconds to attach": attached,
        "ends by itself": old.wait(20) if thaw else None,
    }  # fmt: skip


def late(worker: Worker) -> dict[str, Any]:
    """An answer comes when nobody waits any more; the same service is attached again."""
    with worker.services.pauses.at(Place.BEHIND_GATE, LATE_SECONDS):
        worker.step()
    at_the_fault, first = worker.answered[-1], worker.times[-1]
    began = time.monotonic()
    worker.step()
    while worker.answered[-1] == 0 and time.monotonic() < began + 5:
        time.sleep(0.02)
        worker.step()
    return {
        "answered at the fault": at_the_fault, "first ms": round(first, 1),
        "seconds to attach": round(time.monotonic() - began, 3),
    }  # fmt: skip


def worker_pauses(worker: Worker, seconds: float, *, first: bool) -> dict[str, Any]:
    """The worker takes its time before its first layer, or behind it."""
    worker.many(1)

    def pause() -> None:
        time.sleep(seconds)

    if first:
        worker.step(gated=pause)
    else:
        worker.step(between=pause)
    found = worker.answered[-1]
    worker.many(2)
    return {"answered at the pause": found}


def idle(worker: Worker, seconds: float) -> dict[str, Any]:
    """Nothing happens for several leases."""
    worker.many(1)
    time.sleep(seconds)
    worker.many(1)
    return {"answered": worker.answered[-1], "idle seconds": seconds}


def session_ends(worker: Worker, how: str) -> dict[str, Any]:
    """The service ends the session while its gate waits: it was asked to, or the lease is over."""
    attachment = worker.indexer._attachment
    assert attachment is not None

    def close() -> None:
        attachment.control_plane.close_session(
            pb.CloseSessionRequest(session_id=attachment.session_id, epoch=attachment.epoch)
        )

    def say_nothing() -> None:
        attachment.keep_alive = lambda: None  # type: ignore[method-assign]
        time.sleep(LEASE_SECONDS * 1.25)

    before = len(worker.times)
    worker.step(gated=close if how == "closed" else say_nothing)
    at_the_fault, first = worker.answered[-1], worker.times[before]
    began = time.monotonic()
    worker.step()
    while worker.answered[-1] == 0 and time.monotonic() < began + 5:
        time.sleep(0.02)
        worker.step()
    return {
        "answered at the fault": at_the_fault, "first ms": round(first, 1),
        "seconds to attach": round(time.monotonic() - began, 3),
    }  # fmt: skip


def restarted(worker: Worker) -> dict[str, Any]:
    """Another service is there before anybody has asked for the old one."""
    worker.many(1)
    worker.services.send(signal.SIGKILL)
    worker.services.start()
    worker.services.wait_until_it_serves()
    attached = worker.attach()
    worker.many(2)
    return {"seconds to attach": attached}


Case = Callable[[Worker], dict[str, Any]]


def _ended(number: signal.Signals, place: str) -> Case:
    return lambda worker: ended(worker, number, place, thaw=number == signal.SIGSTOP)


ENDED = {
    f"{name} {place}": _ended(number, place)
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP))
    for place in ("idle", "gated", *PLACES, "prefill")
}
ILLEGAL = {
    "illegal access": lambda worker: ended(worker, signal.SIGUSR1, "idle", thaw=False)
}  # fmt: skip
"""Not under MPS: there it ends the worker as well."""
HELD_UP: dict[str, Case] = {
    "late": late,
    "worker pauses, first": lambda worker: worker_pauses(worker, 0.2, first=True),
    "worker pauses, between": lambda worker: worker_pauses(worker, 0.2, first=False),
    "worker leaves, first": lambda worker: worker_pauses(worker, GATE_SECONDS + 0.3, first=True),
    "worker leaves, between": lambda worker: worker_pauses(worker, GATE_SECONDS + 0.3, first=False),
    "idle": lambda worker: idle(worker, 3.5 * LEASE_SECONDS),
    "closed while gated": lambda worker: session_ends(worker, "closed"),
    "lease ends while gated": lambda worker: session_ends(worker, "lease"),
    "restarted": restarted,
}


def cases(placement: str) -> dict[str, Case]:
    """By name, in the order in which they run."""
    return HELD_UP | ENDED | ({} if placement == "mps" else ILLEGAL)


def services_needed(placement: str) -> int:
    """How many services the cases use up, the last one included."""
    return 2 + len(ENDED) + (0 if placement == "mps" else len(ILLEGAL))


def run(worker: Worker, placement: str, told: Callable[[str, dict[str, Any]], None]) -> None:
    """All cases, whatever becomes of each."""
    for name, case in cases(placement).items():
        began = time.monotonic()
        try:
            found = _told(worker, lambda case=case: case(worker))  # type: ignore[misc]
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        told(name, found | {"seconds": round(time.monotonic() - began, 2)})
