"""-inf past each row's length, where rows have the columns of the longest possible context."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_PROGRAMS_A_ROW = 64


@triton.jit(
    do_not_specialize=("next_n", "limit", "context", "out_row", "length_request",
                       "length_row", "back"),
    do_not_specialize_on_alignment=("out", "seq_lens"),
)  # fmt: skip
def tails_kernel(
    out, seq_lens, next_n, limit, context, out_row: tl.int64, length_request: tl.int64,
    length_row: tl.int64, back, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's tail, shared by the programs of the second axis."""
    row = tl.program_id(0)
    request = row // next_n
    j = row % next_n
    length = seq_lens + request.to(tl.int64) * length_request + j * length_row
    length = tl.load(length) + (j + 1 - next_n) * back
    length = tl.minimum(tl.maximum(length, 0), limit)
    columns = tl.arange(0, BLOCK)
    to = out + row.to(tl.int64) * out_row
    first = length // BLOCK * BLOCK + tl.program_id(1) * BLOCK
    for begin in range(first, context, tl.num_programs(1) * BLOCK):
        place = begin + columns
        tl.store(to + place, float("-inf"), mask=(place >= length) & (place < context))


def fill_tails(out: Tensor, seq_lens: Tensor, limit: int, next_n: int) -> None:
    """Write -inf into out [R, context] from each row's length (cut to `limit`) on."""
    rows, context = out.shape
    programs = min(_PROGRAMS_A_ROW, -(-context // _BLOCK))
    by_row = seq_lens.dim() == 2
    tails_kernel[(rows, programs)](
        out, seq_lens, next_n, limit, context, out.stride(0), seq_lens.stride(0),
        seq_lens.stride(1) if by_row else 0, 0 if by_row else 1, BLOCK=_BLOCK,
    )  # fmt: skip
