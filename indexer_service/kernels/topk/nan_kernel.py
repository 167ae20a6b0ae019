"""Which rows hold NaN, for where the kernel that selects has no register left to note it."""

import triton
import triton.language as tl

from indexer_service.kernels.topk.kernel import ENABLED, POINTERS, UNSPECIALISED, asked, bounds
from indexer_service.kernels.topk.memory import tell_nan_in_memory


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=POINTERS)
def tell_nan_kernel(
    scores, row_at, row_start, row_end, enabled, nan, given, width, rows, scores_stride: tl.int64,
    mark, BLOCK: tl.constexpr,
):  # fmt: skip
    """int32 `nan` becomes at least mark - r if a score of row r is NaN.

    The other arguments are those of `topk_kernel`. Programs take rows in turns.
    """
    if tl.load(enabled, mask=(given & ENABLED) != 0, other=1) != 0:
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            at, start, end = asked(row, rows, row_at, row_start, row_end, given, width)
            origin, length, _ = bounds(row, at, start, end, given, width, scores_stride)
            if origin >= 0:
                tell_nan_in_memory(scores + origin, length, nan, mark - row, BLOCK)
