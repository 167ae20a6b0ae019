"""A step's numbers on their way to the device, without the host ever waiting."""

import torch

from indexer_client.inputs import StepInputs
from indexer_service.kernels.device_inputs import numbers_size, pack_numbers

_STEP_WORDS = 2
"""int32 words of the step, in front of its numbers: they travel together."""


class PlanNumbers:
    """Args:
        max_requests: of the session.
        device: where the kernels read them.

    Attributes:
        step: int64 [1], the step; device_numbers: int32 [numbers_size(max_requests)], see
            `device_inputs.StepNumber`. Both on the device.
    """

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._size = _STEP_WORDS + numbers_size(max_requests)
        self._words = torch.zeros(self._size, dtype=torch.int32, device=device)
        self.step = self._words[:_STEP_WORDS].view(torch.int64)
        self.device_numbers = self._words[_STEP_WORDS:]

    def send(self, inputs: StepInputs, step: int) -> None:
        """Enqueue a step and its numbers on the current stream."""
        # A buffer of its own each time: torch's cache of pinned memory gives it out again only
        # after the copy was made. One that is rewritten while its copy waits tears the step.
        buffer = torch.empty(self._size, dtype=torch.int32, pin_memory=self._is_cuda)
        buffer[:_STEP_WORDS].view(torch.int64)[0] = step
        pack_numbers(
            buffer[_STEP_WORDS:],
            rows=inputs.rows,
            requests=inputs.requests,
            decode_requests=inputs.decode_requests,
            rows_per_decode=inputs.rows_per_decode,
            max_length=inputs.max_length,
            exact_lengths=inputs.exact_seq_lens,
            exact_offsets=inputs.exact_query_start,
        )
        self._words.copy_(buffer, non_blocking=True)
