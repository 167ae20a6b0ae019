"""Runs the hand-over's two sides for `dsa-indexer doctor`, within a time."""

import socket
import time
from contextlib import suppress
from typing import Any

from dsa_indexer_cli.children import PEER_GONE, Child, ChildFailed, any_ended
from dsa_indexer_cli.doctor_finding import Finding, split_fix
from dsa_indexer_cli.gpu_facts import GpuFacts
from ipc_handoff.flag_words import FLAGS, FlagLayout
from ipc_handoff.regions import HostMemory

PROGRAM = "dsa_indexer_cli.handoff_probe"
PROBED_LAYERS = 16
END_SECONDS = 2.0
"""Longer than a gate waits: a process that is killed while a kernel polls can hang MPS."""


PROBE_SECONDS = 14.0
"""For all placements together; a first run compiles kernels."""
_LEAST_SECONDS = 3.0

_POLLS, _SLEEPS = "mps", "timeslice"
"""On one GPU; without MPS a kernel that polls would burn its turn, and streams sleep."""


def handoff_findings(facts: GpuFacts) -> list[Finding]:
    """A layer's hand-over, measured for every placement that the host can give."""
    own = facts.gpus[0]
    pairs = [(_POLLS if own.under_mps else _SLEEPS, own.ordinal)]
    pairs += [("peer_gpu", peer) for peer in own.peers[:1]]
    deadline = time.monotonic() + PROBE_SECONDS
    return [_measured(name, own.ordinal, service, deadline) for name, service in pairs]


def _measured(placement: str, worker_gpu: int, service_gpu: int, deadline: float) -> Finding:
    check = f"hand-over {placement}"
    seconds = deadline - time.monotonic()
    if seconds < _LEAST_SECONDS:
        return Finding(check, None, "not measured: the other placement took all the time")
    try:
        values = measure(worker_gpu, service_gpu, seconds, sleeps=placement == _SLEEPS)
    except ChildFailed as error:
        problem, fix = split_fix(str(error))
        return Finding(
            check, False, problem, fix or "CUDA_VISIBLE_DEVICES: another GPU; a new MPS daemon"
        )
    detail = (
        f"{values['microseconds_a_layer']} us a layer more than in one process (median of "
        f"{values['steps']} steps of {values['layers']} layers; worst "
        f"{values['worst_microseconds_a_layer']})"
    )
    return Finding(check, True, detail, values=values)


def measure(
    worker_gpu: int, service_gpu: int, seconds: float, *, sleeps: bool = False
) -> dict[str, Any]:
    """What the probe's worker prints, see `handoff_probe`.

    Args:
        sleeps: streams sleep, and no kernel polls.

    Raises:
        ChildFailed: it did not work, or not within the time.
    """
    pair = socket.socketpair()
    flags = HostMemory.create(FlagLayout(PROBED_LAYERS).size, FLAGS) if sleeps else None
    shared = () if flags is None else (flags.fileno(),)
    children: list[Child] = []
    try:
        for side, end in zip(("worker", "service"), pair, strict=True):
            descriptor = end.fileno()
            children.append(
                Child(
                    PROGRAM,
                    side,
                    descriptor,
                    worker_gpu,
                    service_gpu,
                    *shared,
                    descriptors=(descriptor, *shared),
                )
            )
        in_time = any_ended(children, seconds)
        _end(pair, children)
        if not in_time:
            raise ChildFailed(
                f"not done within {seconds:.0f} s (fix: nvidia-smi: is the GPU busy?)"
            )
        return _result(children)
    finally:
        for end in pair:
            end.close()
        for child in children:
            child.close()
        if flags is not None:
            flags.close()


def _end(pair: tuple[socket.socket, ...], children: list[Child]) -> None:
    """Both sides end by themselves when their socket does."""
    for end in pair:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + END_SECONDS
    for child in children:
        child.wait(deadline - time.monotonic())


def _result(children: list[Child]) -> dict[str, Any]:
    """The worker's; if it has none, the cause and not that the other side has left."""
    failures = []
    for child in children:
        try:
            found = child.result()
        except ChildFailed as error:
            failures.append(str(error))
        else:
            if child is children[0]:
                return found
    causes = [failure for failure in failures if failure != PEER_GONE]
    raise ChildFailed((causes or failures)[0])
