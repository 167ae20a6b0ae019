"""Runs the hand-over's two sides for `dsa-indexer doctor`, within a time."""

import socket
import time
from contextlib import suppress
from typing import Any

from dsa_indexer_cli.children import PEER_GONE, Child, ChildFailed, any_ended
from dsa_indexer_cli.doctor_finding import Finding, split_fix
from dsa_indexer_cli.gpu_facts import GpuFacts

PROGRAM = "dsa_indexer_cli.handoff_probe"
END_SECONDS = 2.0
"""Longer than a gate waits: a process that is killed while a kernel polls can hang MPS."""


PROBE_SECONDS = 14.0
"""For all placements together; a first run compiles kernels."""
_LEAST_SECONDS = 3.0

_NOTHING_POLLS = (
    "not measured: one GPU without MPS, where processes take turns and nothing may poll: a kernel "
    "that polls burns its time slice while the other process waits for its own (about 4.5 ms a "
    "layer on an H200; 290 us where streams sleep on memory instead)"
)


def handoff_findings(facts: GpuFacts) -> list[Finding]:
    """A layer's hand-over, measured for every placement that polls and that the host can give."""
    own = facts.gpus[0]
    pairs = [("mps", own.ordinal)] if own.under_mps else []
    pairs += [("peer_gpu", peer) for peer in own.peers[:1]]
    if not pairs:
        return [Finding("hand-over", None, _NOTHING_POLLS)]
    deadline = time.monotonic() + PROBE_SECONDS
    return [_measured(name, own.ordinal, service, deadline) for name, service in pairs]


def _measured(placement: str, worker_gpu: int, service_gpu: int, deadline: float) -> Finding:
    check = f"hand-over {placement}"
    seconds = deadline - time.monotonic()
    if seconds < _LEAST_SECONDS:
        return Finding(check, None, "not measured: the other placement took all the time")
    try:
        values = measure(worker_gpu, service_gpu, seconds)
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


def measure(worker_gpu: int, service_gpu: int, seconds: float) -> dict[str, Any]:
    """What the probe's worker prints, see `handoff_probe`.

    Raises:
        ChildFailed: it did not work, or not within the time.
    """
    pair = socket.socketpair()
    children: list[Child] = []
    try:
        for side, end in zip(("worker", "service"), pair, strict=True):
            descriptor = end.fileno()
            children.append(
                Child(PROGRAM, side, descriptor, worker_gpu, service_gpu, descriptors=(descriptor,))
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
