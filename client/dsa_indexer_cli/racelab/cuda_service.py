"""A service on a GPU for the race lab: `python -m ... ADDRESS GATE_SECONDS DETECTORS OPEN`.

It does not tune: tuned kernels select the same bits, and tuning takes longer than the lab. With
OPEN = 1 its steps do not wait until they are published, which no setting of a service can do.
"""

import logging
import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

from indexer_service import serving
from indexer_service.kernels import warm_up
from indexer_service.settings import load
from ipc_handoff.kernels.gate import gate
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.words import Gate, Live

_GATE = "indexer_service.step_kernels.gate"


def open_gate(memory: ServiceMemory, kind: Gate, **rest: Any) -> None:
    """In place of a step's own gate: what it writes when it passes, without having waited."""
    if kind is not Gate.PUBLISHED:
        gate(memory, kind, **rest)
        return
    memory.live[Live.LIVE].fill_(1)
    memory.live[Live.ANSWERED].fill_(0)


def main(address: str, gate_seconds: str, detectors: str, is_open: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    with ExitStack() as stack:
        nothing = mock.patch.object(warm_up, "tuned_operations", lambda *_: iter(()))
        stack.enter_context(nothing)
        if is_open == "1":
            stack.enter_context(mock.patch(_GATE, open_gate))
        serving.run(
            load(
                {
                    "address": address,
                    "device": "cuda:0",
                    "gate_bound_seconds": float(gate_seconds),
                    "detectors": detectors,
                }
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
