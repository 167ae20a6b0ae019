"""A service on a GPU for the race lab: `python -m ... ADDRESS GATE_SECONDS DETECTORS OPEN FOUND`.

It does not tune: tuned kernels select the same bits, and tuning takes longer than the lab. With
OPEN = 1 its steps do not wait until they are published, which no setting of a service can do. What
it finds it appends to the file FOUND, each finding a line.
"""

import json
import logging
import sys
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from indexer_service import serving
from indexer_service.kernels import warm_up
from indexer_service.server import Service
from indexer_service.settings import load
from ipc_handoff.findings import Finding, FindingKind
from ipc_handoff.kernels.gate import gate
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.words import Gate, Live

_GATE = "indexer_service.step_kernels.gate"
_SERVICE = "indexer_service.serving.Service"


def open_gate(memory: ServiceMemory, kind: Gate, **rest: Any) -> None:
    """In place of a step's own gate: what it writes when it passes, without having waited."""
    if kind is not Gate.PUBLISHED:
        gate(memory, kind, **rest)
        return
    memory.live[Live.LIVE].fill_(1)
    memory.live[Live.ANSWERED].fill_(0)


class WrittenFindings:
    """A listener of the service's process that tells the lab's."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def found(self, finding: Finding) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(finding)) + "\n")


class ReadFindings:
    """The same findings, in the lab's process."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = 0

    def new(self) -> list[Finding]:
        """Those whose line is whole, since the last call."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        found = [json.loads(line) for line in whole.splitlines()]
        return [Finding(**{**one, "kind": FindingKind(one["kind"])}) for one in found]


def main(address: str, gate_seconds: str, detectors: str, is_open: str, found: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    with ExitStack() as stack:
        nothing = mock.patch.object(warm_up, "tuned_operations", lambda *_: iter(()))
        stack.enter_context(nothing)
        listening = partial(Service, findings=WrittenFindings(Path(found)))
        stack.enter_context(mock.patch(_SERVICE, listening))
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
