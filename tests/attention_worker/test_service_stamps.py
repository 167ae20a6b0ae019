"""A dead service's stamps, read by the worker: each GPU has a clock of its own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_worker import worker_banks
from attention_worker.worker_banks import WorkerBank
from ipc_handoff.banks import ANSWERS
from ipc_handoff.device_banks import DeviceBank
from ipc_handoff.device_layout import DEVICE_STAMPED_STEPS
from ipc_handoff.kernels.clock import ClockOffset
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.stages import SERVICE_STAGES

GEOMETRY = HandoffGeometry(
    layers=(3, 7), heads=16, head_dim=8, top_k=8, page_size=32, max_rows=4, max_requests=2,
    max_context=64, slots=2,
)  # fmt: skip
SERVICE, WORKER, STEP = 1, 0, 5
CLOCKS = {SERVICE: 7_000_000, WORKER: 90}
"""What each GPU's clock is behind the host's, ns."""


class Reader:
    """A `SideReader` of a GPU that is not there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def copies(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        assert self.device.index == WORKER, "the stamps lie in the worker's memory"
        return [tensor.clone() for tensor in tensors]

    def clock(self) -> ClockOffset:
        return ClockOffset(CLOCKS[self.device.index], 1)


def test_they_are_put_on_the_hosts_clock_by_the_gpu_that_made_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = len(GEOMETRY.layers) * len(SERVICE_STAGES)
    width = GEOMETRY.device.stamp_stride // 8
    blocks = torch.zeros((DEVICE_STAMPED_STEPS, width), dtype=torch.int64)
    blocks[STEP, 0] = STEP
    blocks[STEP, 1 : 1 + cells] = torch.arange(cells)  # the first stage was not reached
    memory = SimpleNamespace(tensor=lambda *place: blocks)

    def made(bank: Any, *arguments: Any) -> None:
        bank.memories, bank.control = {ANSWERS: memory}, SimpleNamespace()

    monkeypatch.setattr(DeviceBank, "__init__", made)
    monkeypatch.setattr(worker_banks, "new_event", lambda: None)
    monkeypatch.setattr(worker_banks, "SideReader", Reader)
    bank = WorkerBank(GEOMETRY, 0, SERVICE, WORKER)
    times = bank.control.service_stamps.read(STEP)
    assert times is not None
    assert times.clock_error == 1
    found = [at for stamps in times for at in stamps]
    assert found == [0] + [CLOCKS[SERVICE] + at for at in range(1, cells)]
