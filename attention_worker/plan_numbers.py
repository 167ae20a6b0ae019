"""A step's numbers on their way to the device, without the host ever waiting."""

import torch

from indexer_client.inputs import StepInputs
from indexer_service.kernels.device_inputs import numbers_size, pack_numbers


class PlanNumbers:
    """Args:
        max_requests: of the session.
        device: where the kernels read them.

    Attributes:
        device_numbers: int32 [numbers_size(max_requests)], see `device_inputs.StepNumber`.
    """

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._size = numbers_size(max_requests)
        self.device_numbers = torch.zeros(self._size, dtype=torch.int32, device=device)

    def send(self, inputs: StepInputs) -> None:
        """Enqueue a step's numbers on the current stream."""
        # A buffer of its own each time: torch's cache of pinned memory gives it out again only
        # after the copy was made. One that is rewritten while its copy waits tears the step.
        buffer = torch.empty(self._size, dtype=torch.int32, pin_memory=self._is_cuda)
        pack_numbers(
            buffer,
            rows=inputs.rows,
            requests=inputs.requests,
            decode_requests=inputs.decode_requests,
            rows_per_decode=inputs.rows_per_decode,
            max_length=inputs.max_length,
            exact_lengths=inputs.exact_seq_lens,
            exact_offsets=inputs.exact_query_start,
        )
        self.device_numbers.copy_(buffer, non_blocking=True)
