"""What the worker's hand-over kernels keep between launches. None of it is shared."""

import torch

from ipc_handoff.kernels.found import Found
from ipc_handoff.kernels.words import Decision, Told, WorkerState
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.stages import WORKER_STAGES
from ipc_handoff.words import WORD_BYTES

STAMPED_STEPS = 64


class WorkerMemory:
    """Made once in a worker's life, before the first capture: graphs hold its addresses.

    Args:
        geometry: of the session.
        device: where the worker's stream runs; a CPU only in the interpreter.
        checks_generations: whether kernels look whose answers the slots hold.
        checks_shared_indices: whether they look whose selection layers share.

    Attributes:
        state: int64, `WorkerState`.
        decision: int32, `Decision`.
        detached, rescued, inline: int32 [1], views of it. Give one of them to inline kernels as
            `enabled`: `detached` to those before the wait, and behind it `rescued`, or `inline`
            to those that do the work of both.
        arrived: int32 [1], programs of the running launch that are done.
        stamps: int64, a ring of STAMPED_STEPS steps.
        found: where kernels tell what contradicts itself.
        begun: int64 [1], the newest step that the host has begun, whoever computes it.
        order, told: int64 in pinned host memory, see `Told`; `order` [1] is the attachment that
            the host wants to end.
    """

    def __init__(
        self,
        geometry: HandoffGeometry,
        device: torch.device,
        *,
        checks_generations: bool = True,
        checks_shared_indices: bool = True,
    ) -> None:
        self.geometry = geometry
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.cells = len(geometry.layers) * len(WORKER_STAGES)
        self.found = Found(device)
        self.checks_generations = checks_generations
        self.checks_shared_indices = checks_shared_indices
        self.begun = torch.zeros(1, dtype=torch.int64, device=device)
        self.state = torch.zeros(len(WorkerState), dtype=torch.int64, device=device)
        self.decision = torch.zeros(len(Decision), dtype=torch.int32, device=device)
        self.detached, _, self.rescued, self.inline = self.decision.split(1)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self.stamps = torch.zeros((STAMPED_STEPS, 1 + self.cells), dtype=torch.int64, device=device)
        self.order = torch.zeros(1, dtype=torch.int64, pin_memory=self.is_cuda)
        self.told = torch.zeros(len(Told), dtype=torch.int64, pin_memory=self.is_cuda)

    def stamps_of(self, step: int) -> int:
        """The address of a step's stamps."""
        return self.stamps.data_ptr() + step % STAMPED_STEPS * (1 + self.cells) * WORD_BYTES
