"""What a session's calls have in common, and inputs of its shapes that say nothing."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """What a session's calls have in common.

    Attributes:
        heads, head_dim: H and D of the indexer.
        page: tokens a page. page_stride: bytes from one page to the next (None: no gap).
        k: the most that is selected of a row.
        next_n: query rows of one decode request, all that occur.
        max_context: tokens of the longest request.
        max_decode_rows, max_prefill_rows: of one call.
        workspace: as given to `indexer.select_paged` and `select_ragged`.
        key_dtype: of the keys that are inserted.
        notes_nan: selections note scores that are NaN.
        replica: the device of the second cache that they go into, if they do.
    """

    heads: int
    max_context: int
    max_decode_rows: int
    max_prefill_rows: int
    head_dim: int = 128
    page: int = 64
    page_stride: int | None = None
    k: int = 2048
    next_n: tuple[int, ...] = (1,)
    workspace: int | None = None
    key_dtype: torch.dtype = torch.bfloat16
    replica: torch.device | None = None
    notes_nan: bool = False

    def cache(self, pages: int, device: torch.device) -> Tensor:
        """A K cache of zeros, uint8 [pages, page, head_dim+4]."""
        width = self.head_dim + 4
        stride = self.page_stride or self.page * width
        room = torch.zeros(pages * stride, dtype=torch.uint8, device=device)
        return room.as_strided((pages, self.page, width), (stride, width, 1))

    def columns(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page)
