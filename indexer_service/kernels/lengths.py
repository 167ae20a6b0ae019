"""How many keys each query row sees, from `seq_lens` in both its forms.

(In kernels: `mqa_logits.paged_share.row_length`.)
"""

import torch
from torch import Tensor


def row_lengths(seq_lens: Tensor, next_n: int) -> Tensor:
    """Keys that each of a request's `next_n` rows sees.

    Args:
        seq_lens: int32 [B, next_n] (one length a row), or [B]: the length L after the last row,
            where row j sees L - next_n + 1 + j.

    Returns:
        int32 [B, next_n]; zero or less means that the row sees nothing.
    """
    if seq_lens.dim() == 2:
        return seq_lens
    back = torch.arange(1 - next_n, 1, dtype=torch.int32, device=seq_lens.device)
    return seq_lens.unsqueeze(1) + back
