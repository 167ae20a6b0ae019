"""What the host knows of a forward: how many rows there are, and which of them are whose."""

from dataclasses import dataclass
from typing import Self

from indexer_client.inputs import StepInputs


@dataclass(frozen=True)
class StepShape:
    """Kernels are enqueued by these numbers; what the device knows alone is not in them.

    Attributes:
        decode_requests, rows_per_decode: the first so many requests have so many rows each.
        offsets: first row of each request, then the number of rows.
        length_bounds: of each request, at least its length.
        max_length: at least every length.
    """

    decode_requests: int
    rows_per_decode: int
    offsets: tuple[int, ...]
    length_bounds: tuple[int, ...]
    max_length: int

    @property
    def rows(self) -> int:
        return self.offsets[-1]

    @property
    def requests(self) -> int:
        return len(self.length_bounds)

    @property
    def is_decode(self) -> bool:
        """Whether no request is prefilled: such a forward can be captured."""
        return self.decode_requests == self.requests

    @classmethod
    def of(cls, inputs: StepInputs) -> Self:
        """Of a step.

        Raises:
            ValueError: nobody said where its requests begin.
        """
        offsets = inputs.exact_query_start
        if offsets is None:
            raise ValueError(
                "exact_query_start: None (fix: the CPU's own query_start; reading the device's "
                "would make every step wait for it)"
            )
        bounds = inputs.exact_seq_lens
        if bounds is None:
            bounds = (inputs.max_length,) * inputs.requests
        return cls(
            inputs.decode_requests,
            inputs.rows_per_decode,
            tuple(offsets),
            tuple(bounds),
            inputs.max_length,
        )

    @classmethod
    def of_decodes(cls, rows: int, rows_per_decode: int, max_length: int) -> Self:
        """Of a batch in which every request decodes, perhaps padded.

        Raises:
            ValueError: rows are left over.
        """
        requests, left = divmod(rows, rows_per_decode)
        if not requests or left:
            raise ValueError(
                f"rows: {rows} with {rows_per_decode} a request (fix: a multiple of it; only "
                "decode steps can be captured whole)"
            )
        offsets = tuple(range(0, rows + 1, rows_per_decode))
        return cls(requests, rows_per_decode, offsets, (max_length,) * requests, max_length)
