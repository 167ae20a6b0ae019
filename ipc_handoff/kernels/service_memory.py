"""What the service's hand-over kernels of one attachment keep between launches."""

import torch

from ipc_handoff.device_layout import DEVICE_STAMPED_STEPS
from ipc_handoff.kernels.words import Live
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.stages import SERVICE_STAGES


class ServiceMemory:
    """Made with the attachment: graphs hold its addresses, and those of the worker's bank.

    Args:
        geometry: of the session.
        device: where the service's stream runs; a CPU only in the interpreter.
        staging, answers: addresses of the bank's regions, as this process sees them.
        checks_generations: whether kernels look whose data the slots hold.

    Attributes:
        step: int64 [1], the step that the stream works on, written by that stream.
        live: int32, `Live`.
        enabled: int32 [1], a view of it: 1 while the step is wanted. For scoring and selection.
        progress: int64 [1], windows finished so far.
        arrived: int32 [1], programs that have stored their part of a layer's answer.
        closing: int64 [1] in pinned host memory; not 0: steps end.
    """

    def __init__(
        self,
        geometry: HandoffGeometry,
        device: torch.device,
        staging: int,
        answers: int,
        *,
        checks_generations: bool = True,
    ) -> None:
        self.geometry = geometry
        self.device = device
        self.staging, self.answers = staging, answers
        self._checks_generations = checks_generations
        self.is_cuda = device.type == "cuda"
        self.cells = len(geometry.layers) * len(SERVICE_STAGES)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.live = torch.zeros(len(Live), dtype=torch.int32, device=device)
        self.enabled = self.live[Live.LIVE : Live.LIVE + 1]
        self.progress = torch.zeros(1, dtype=torch.int64, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self.closing = torch.zeros(1, dtype=torch.int64, pin_memory=self.is_cuda)

    def answer_at(self, slot: int) -> int:
        """The address of an answer slot."""
        return self.answers + self.geometry.device.answers_at(slot)

    def looked_at(self, slot: int) -> int:
        """The address of a staging slot; 0: nobody looks whose data it holds."""
        return (
            self.staging + self.geometry.device.staging_at(slot) if self._checks_generations else 0
        )

    @property
    def stamp_numbers(self) -> tuple[int, int, int]:
        """Address of the ring of stamps, steps in it, and bytes of each."""
        layout = self.geometry.device
        return self.answers + layout.stamps, DEVICE_STAMPED_STEPS, layout.stamp_stride
