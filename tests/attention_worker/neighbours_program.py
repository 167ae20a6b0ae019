"""A worker that lives beside others, for tests that watch what they do to each other:

    python -m tests.attention_worker.neighbours_program ADDRESS PLACEMENT SERVICE_DEVICE ROLE [ROOM]

It says `ready` when its steps are answered, or it could open a session. `runs`: steps until a line
comes, then one JSON line: when each began, how long the GPU took, and how many selections were
wrong. `comes and goes`: at a line opens and ends some sessions and says `done`; it dies in the last
one's step. ROOM: bytes of the allocation that its K caches lie in.
"""

import json
import os
import select
import signal
import sys
import time
from unittest.mock import patch

import torch

from attention_worker.device_session import DeviceIndexer
from attention_worker.device_steps import DeviceSteps
from indexer_client import ClientSettings
from tests.attention_worker.gpu_steps import GEOMETRY, GpuSteps
from tests.attention_worker.gpu_worker import Captured
from tests.attention_worker.services import READY_SECONDS

REQUESTS = 8
DIFFERENT = 8
SESSIONS = 6
DEVICE = torch.device("cuda", 0)


class Neighbour:
    """Steps of one worker, whose sessions come and go.

    Attributes:
        steps: (when it began, by the clock that all processes have; its us on the GPU).
        wrong: how many selections were.
    """

    def __init__(self, address: str, placement: str, service_device: int, room: int) -> None:
        whole = torch.zeros(room, dtype=torch.uint8, device=DEVICE) if room else None
        self._data = GpuSteps(DEVICE, whole=whole)
        self._settings = ClientSettings(
            address=address, placement=placement, reattach_seconds=0.05, rpc_timeout_seconds=5.0
        )
        self._service_device = service_device
        self._cases = [self._data.case(number, REQUESTS) for number in range(DIFFERENT)]
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.steps: list[tuple[float, float]] = []
        self.wrong = 0
        self.open()

    def open(self) -> None:
        """A session from now on."""
        self.indexer = DeviceIndexer(
            GEOMETRY, self._data.k_caches, device=DEVICE, settings=self._settings,
            service_device=self._service_device,
        )  # fmt: skip
        for layer, shared in self.indexer._shared.items():
            if shared.tensor.device != DEVICE:
                shared.tensor.copy_(self._data.k_caches[layer])
                torch.cuda.synchronize(shared.tensor.device)
        torch.cuda.synchronize()
        DeviceSteps.warm_up(self.indexer, (1,))
        self._captured = Captured(self.indexer, self._data, REQUESTS, 1)
        self.indexer.start()
        self.indexer.wait_attached(READY_SECONDS)

    def step(self) -> None:
        case = self._cases[len(self.steps) % DIFFERENT]
        began = time.monotonic()
        self.indexer.begin_step(case.inputs)
        begin, end = self._events
        begin.record()
        self._captured.replay(case)
        end.record()
        end.synchronize()
        self.steps.append((began, begin.elapsed_time(end) * 1e3))
        same = [torch.equal(self._captured.out[layer], out) for layer, out in case.expected.items()]
        self.wrong += same.count(False)

    def close(self) -> None:
        self.indexer.close()


def _has_line() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def runs(neighbour: Neighbour) -> None:
    while not _has_line():
        neighbour.step()
    answered = neighbour.indexer.statistics.answered_layers
    asked = len(neighbour.steps) * len(GEOMETRY.layers)
    told = {"steps": neighbour.steps, "wrong": neighbour.wrong, "inline": asked - answered}
    print(json.dumps(told), flush=True)
    neighbour.close()


def comes_and_goes(neighbour: Neighbour) -> None:
    neighbour.close()
    sys.stdin.readline()
    for _ in range(SESSIONS):
        neighbour.open()
        neighbour.step()
        neighbour.close()
    neighbour.open()
    neighbour.step()
    print(json.dumps({"wrong": neighbour.wrong}), flush=True)
    neighbour.indexer.begin_step(neighbour._cases[0].inputs)
    torch.cuda.synchronize()  # the service's gate waits for its first layer
    os.kill(os.getpid(), signal.SIGKILL)


def main(address: str, placement: str, service_device: str, role: str, room: str = "0") -> None:
    with patch("indexer_service.kernels.warm_up.tuned_operations", lambda *arguments: iter(())):
        neighbour = Neighbour(address, placement, int(service_device), int(room))
        for _ in range(DIFFERENT):
            neighbour.step()
        neighbour.steps.clear()
        print("ready", flush=True)
        if role == "comes and goes":
            comes_and_goes(neighbour)
        else:
            runs(neighbour)


if __name__ == "__main__":
    main(*sys.argv[1:])
