"""What happens to a worker when its service is ended, or held up, at every place of a step.

One worker with one CUDA context and one graph lives through all cases. Every step has data of its
own, every selection is compared with one that was computed apart, and banks are poisoned before
each case.
"""

import signal
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import IndexerError
from tests.attention_worker.fault_worker import Worker, poison
from tests.attention_worker.pauses import Place

LEASE_SECONDS, GATE_SECONDS = 1.0, 1.5
"""Of the services: a lease ends while a gate still waits."""
PAUSE_SECONDS = 0.03
"""Longer than a worker waits."""
_INTO_A_PAUSE = 0.006
_GONE_SECONDS = 0.05
"""Of a service that was ended, before its worker comes to its first layer."""
_AFTER = 4
"""Steps without a service, and with its successor."""

PLACES = {"behind the gate": Place.BEHIND_GATE, "behind the scores": Place.BEHIND_SCORES}
"""Where in a step the service stays for a while."""


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
        ends.append(time.perf_counter())

    def end_and_wait() -> None:
        end()
        if number == signal.SIGKILL:
            old.wait(20)
        time.sleep(_GONE_SECONDS)

    ends: list[float] = []

    before = len(worker.times)
    if place == "idle":
        end()
        if number == signal.SIGUSR1:
            while old.poll() is None:  # it goes on for a moment
                worker.step()
            before = len(worker.times)
        worker.step()
    elif place == "gated":
        worker.step(gated=end_and_wait)
    else:
        with services.pauses.at(PLACES.get(place, Place.BEHIND_GATE), PAUSE_SECONDS):
            worker.step(running=end_soon, prefill=place == "prefill")
    in_the_step = bool(ends) and ends[0] < worker.ended
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
        "in the step": in_the_step, "answered at the fault": at_the_fault, "inline": inline,
        "remote": remote, "bound ms": bound, "seconds to attach": attached,
        "ends by itself": old.wait(20) if thaw else None,
    }  # fmt: skip


def _noticed(worker: Worker) -> dict[str, Any]:
    """What a step cost, and how long it takes from now until one is answered again."""
    told = {
        "answered at the fault": worker.answered[-1], "first ms": round(worker.times[-1], 1),
    }  # fmt: skip
    began = time.monotonic()
    worker.step()
    while worker.answered[-1] == 0 and time.monotonic() < began + 5:
        time.sleep(0.02)
        worker.step()
    return told | {"seconds to attach": round(time.monotonic() - began, 3)}


def late(worker: Worker) -> dict[str, Any]:
    """An answer comes when nobody waits any more; the same service is attached again."""
    with worker.services.pauses.at(Place.BEHIND_GATE, PAUSE_SECONDS):
        worker.step()
    return _noticed(worker)


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

    worker.step(gated=close if how == "closed" else say_nothing)
    return _noticed(worker)


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
    for name, number in (("stopped", signal.SIGSTOP), ("killed", signal.SIGKILL))
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


def cases(placement: str, *parts: str) -> dict[str, Case]:
    """By name, in the order in which they run; those of which a part is in the name, if any."""
    every = HELD_UP | ENDED | ({} if placement == "mps" else ILLEGAL)
    return {
        name: case
        for name, case in every.items()
        if not parts or any(part in name for part in parts)
    }


def lives(placement: str) -> list[list[str]]:
    """Names of the cases that one worker each lives through.

    Under MPS a service that is killed while a kernel of it runs may end the worker: NVIDIA promises
    nothing. What can be that comes last, in a life of its own.
    """
    names = list(cases(placement))
    risky = [name for name in names if name.startswith("killed") and not name.endswith("idle")]
    if placement != "mps":
        return [names]
    return [[name for name in names if name not in risky], risky]


def services_needed(chosen: Mapping[str, Case]) -> int:
    """How many services the cases use up, the last one included."""
    return 1 + len(chosen.keys() & {"restarted", *ENDED, *ILLEGAL})


def run(
    worker: Worker, chosen: Mapping[str, Case], told: Callable[[str, dict[str, Any]], None]
) -> None:
    """All of them, until the worker's GPU is lost."""
    for name, case in chosen.items():
        began = time.monotonic()
        try:
            found = _told(worker, lambda case=case: case(worker))  # type: ignore[misc]
        except IndexerError as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        told(name, found | {"seconds": round(time.monotonic() - began, 2)})
