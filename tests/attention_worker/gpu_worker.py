"""A worker's device steps on a GPU, whose attachments a test makes, and one graph of its layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from attention_worker.device_handoff import DeviceHandoff
from attention_worker.device_steps import DeviceSteps
from attention_worker.inline_kernels import InlineKernels
from attention_worker.timeslice_handoff import TimesliceHandoff
from attention_worker.worker_banks import WorkerBank
from indexer_client import ClientSettings
from indexer_client.attachment import AttachRequest, worker_identity
from ipc_handoff.banks import ANSWERS, STAGING, BankPool
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.regions import TensorSpec
from tests.attention_worker.gpu_steps import GpuCase, GpuSteps, wrong
from tests.attention_worker.hand_service import POISON, HandCaretaker
from tests.attention_worker.stand_in import GpuAttachment, SleepingStandIn, StandIn


@dataclass
class GpuWorker:
    """Device steps whose attachments a test makes."""

    steps: GpuSteps
    device_steps: DeviceSteps
    handoff: DeviceHandoff
    caretaker: HandCaretaker
    _banks: int = 0

    def attach(self) -> tuple[GpuAttachment, StandIn]:
        """From the next step on there is a service; its bank is poisoned."""
        self._banks += 1
        bank = WorkerBank(self.steps.geometry, self._banks, 0, 0)
        for memory in (bank.memories[STAGING], bank.memories[ANSWERS]):
            spec = TensorSpec((memory.byte_size,), torch.uint8)
            memory.tensor(0, memory.byte_size, spec, "bank").fill_(POISON)
        torch.cuda.synchronize()
        attachment = GpuAttachment(bank, self._banks)
        if isinstance(self.handoff, TimesliceHandoff):
            flags = self.handoff._mapped.address
            service: StandIn = SleepingStandIn(self.steps, attachment, flags)
        else:
            service = StandIn(self.steps, attachment)
        bank.start(self._banks)
        self.caretaker.ready = attachment
        return attachment, service


@contextmanager
def gpu_worker(
    steps: GpuSteps, wait_bound: float = 0.02, kind: type[DeviceHandoff] = DeviceHandoff
) -> Iterator[GpuWorker]:
    memory = WorkerMemory(steps.geometry, steps.device)
    handoff = kind(memory, wait_bound)
    made = DeviceSteps(
        AttachRequest(
            settings=ClientSettings(address="unix:/nowhere/i.sock"),
            worker=worker_identity("gpu"), geometry=steps.geometry, k_caches={},
            configuration_hash="", tracing=None,
        ),
        BankPool(lambda number: WorkerBank(steps.geometry, number, 0, 0), banks=0),
        InlineKernels(steps.geometry, steps.k_caches, steps.device),
        handoff,
        device=steps.device,
    )  # fmt: skip
    caretaker = HandCaretaker()
    made._caretaker = cast(Any, caretaker)
    made.warm_up((1, 2))  # as a session does: nothing is compiled while the service waits
    handoff.start()
    try:
        yield GpuWorker(steps, made, handoff, caretaker)
    finally:
        made.close()


class Captured:
    """One FULL graph of all layers, of so many decode requests; padded by the steps it runs."""

    def __init__(self, indexer: DeviceSteps, steps: GpuSteps, requests: int, next_n: int) -> None:
        geometry = steps.geometry
        rows, kind = requests * next_n, {"device": steps.device}
        width = (rows, geometry.heads, geometry.head_dim)
        self.q = {layer: torch.zeros(width, dtype=torch.uint8, **kind) for layer in geometry.layers}
        self.weights = {
            layer: torch.zeros((rows, geometry.heads), **kind) for layer in geometry.layers
        }
        self.out = {
            layer: torch.full((rows, geometry.top_k), -2, dtype=torch.int32, **kind)
            for layer in geometry.layers
        }
        self._indexer = indexer
        indexer.begin_inline(rows, next_n)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self._forward()  # compiles
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._forward()

    def _forward(self) -> None:
        for layer, q in self.q.items():
            self._indexer.select(layer, q, self.weights[layer], self.out[layer])

    def replay(self, case: GpuCase) -> None:
        """Enqueue a step that was begun."""
        for layer, q in case.q.items():
            self.q[layer][: len(q)].copy_(q)
            self.weights[layer][: len(q)].copy_(case.weights[layer])
            self.out[layer].fill_(-2)
        self.graph.replay()

    def wrong(self, case: GpuCase) -> list[str]:
        """Waits, and tells each layer that is not as expected."""
        torch.cuda.synchronize()
        return wrong(case, self.out)
