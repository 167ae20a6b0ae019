"""Scores of a tile of keys for a block of rows on SM90, e4m3 products.

As `ragged_tile`, written in Gluon, Triton's lower level, for what Triton leaves to itself: the
tile is multiplied in parts, so that the sums of one part's heads need few registers and three
programs share a multiprocessor, whose matrix units then always have work queued; and the head sum
ends in the thread that stores it.
"""

from functools import lru_cache

import triton.experimental.gluon.language as gl
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from indexer_service.kernels.mqa_logits.ragged_tile import UNALIGNED, UNSPECIALISED


@gluon.constexpr_function
def _vector(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def _whole(rows, warps):
    """[keys, rows, 4]: a thread has all four parts of a head sum, a warp 16 keys of two rows."""
    registers, lanes, groups = [[0, 0, 1], [0, 0, 2]], [[1, 0, 0], [2, 0, 0], [4, 0, 0]], []
    lanes += [[8, 0, 0], [0, 1 if rows > 1 else 0, 0]]
    row = 2
    while row < rows:
        registers.append([0, row, 0])
        row *= 2
    key = 16
    while key < 16 * warps:
        groups.append([key, 0, 0])
        key *= 2
    return gl.DistributedLinearLayout(registers, lanes, groups, [], [16 * warps, rows, 4])


@gluon.jit
def _seeing_rows(
    row_start, row_end, first_row, end_row, first_key, end_key, MOST_ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """As `ragged_tile.seeing_rows`."""
    row = first_row + gl.arange(0, MOST_ROWS, _vector(WARPS))
    inside = row < end_row
    start = gl.load(row_start + row, mask=inside, other=0)
    end = gl.load(row_end + row, mask=inside, other=0)
    sees = (gl.maximum(start, first_key) < gl.minimum(end, end_key)) & inside
    low = gl.min(gl.where(sees, row, end_row), 0)
    high = gl.max(gl.where(sees, row + 1, first_row), 0)
    return low, high


@gluon.jit
def _fill(out, first_row, end_row, out_row, first_key, end_key, KEYS: gl.constexpr,
          WARPS: gl.constexpr):  # fmt: skip
    key = first_key + gl.arange(0, KEYS, _vector(WARPS))
    nothing = gl.full([KEYS], float("-inf"), gl.float32, _vector(WARPS))
    for row in range(first_row, end_row):
        gl.store(out + gl.cast(row, gl.int64) * out_row + key, nothing, mask=key < end_key)


@gluon.jit
def _copy_rows(
    q, weights, row, high, queries, shared_weights, ready, HEADS: gl.constexpr, WARPS: gl.constexpr
):
    """Start copying the queries and weights of the rows from `row` on, if it is below `high`."""
    COLUMNS: gl.constexpr = queries.shape[0]
    DIM: gl.constexpr = queries.shape[1]
    there = row < high
    mbarrier.expect(ready, COLUMNS * DIM, pred=there)
    tma.async_copy_global_to_shared(q, [row * HEADS, 0], ready, queries, pred=there)
    column = gl.arange(0, COLUMNS, _vector(WARPS))
    there = row + column // HEADS < high
    at = weights + gl.cast(row, gl.int64) * HEADS + column
    async_copy.async_copy_global_to_shared(shared_weights, at, mask=there)
    async_copy.commit_group()


@gluon.jit
def _multiply(tile, queries, LAYOUT: gl.constexpr):
    KEYS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = queries.shape[0]
    nothing = gl.zeros([KEYS, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(tile, queries.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _sum_heads(products, weight, ROWS: gl.constexpr, HEADS: gl.constexpr, WARPS: gl.constexpr):
    """As `ragged_heads.sum_heads`, in the same order: a thread's heads, then the four threads."""
    KEYS: gl.constexpr = products.shape[0]
    terms = gl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    terms = gl.permute(gl.reshape(terms, [KEYS, ROWS, HEADS // 8, 4, 2]), (0, 1, 3, 2, 4))
    parts = gl.sum(gl.reshape(terms, [KEYS, ROWS, 4, HEADS // 4]), 3)
    WHOLE: gl.constexpr = _whole(ROWS, WARPS)
    parts = gl.reshape(gl.convert_layout(parts, WHOLE), [KEYS, ROWS, 2, 2])
    total = gl.sum(gl.sum(parts, 2), 2)
    return gl.convert_layout(total, gl.SliceLayout(2, WHOLE), assert_trivial=True)


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_kernel(
    q, k, k_scale, weights, row_start, row_end, out, enabled, rows, keys, block_rows,
    out_row: gl.int64, HEADS: gl.constexpr, DIM: gl.constexpr, PARTS: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, MOST_ROWS: gl.constexpr, FILL: gl.constexpr,
    OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """PARTS * 16 * num_warps keys for block_rows rows, ROWS at a time; as `ragged_tile`.

    q [M * HEADS, DIM], k [N, DIM]: descriptors as `operand` makes them, of ROWS * HEADS and of
    16 * num_warps rows. OVERLAP: start a part's product before the last one's is waited for.
    """
    if enabled is not None and gl.load(enabled) == 0:
        return
    PART: gl.constexpr = 16 * num_warps
    KEYS: gl.constexpr = PARTS * PART
    COLUMNS: gl.constexpr = ROWS * HEADS
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, COLUMNS, 32])
    SCORE: gl.constexpr = gl.SliceLayout(2, _whole(ROWS, num_warps))
    tiles = gl.cdiv(keys, KEYS)
    program = gl.program_id(0)
    first_key = (program % tiles) * KEYS
    first_row = (program // tiles) * block_rows
    end_row = gl.minimum(first_row + block_rows, rows)
    end_key = gl.minimum(first_key + KEYS, keys)
    low, high = _seeing_rows(
        row_start, row_end, first_row, end_row, first_key, end_key, MOST_ROWS, num_warps
    )
    if FILL:
        _fill(out, first_row, low, out_row, first_key, end_key, KEYS, num_warps)
        _fill(out, gl.maximum(low, high), end_row, out_row, first_key, end_key, KEYS, num_warps)
    if low >= high:
        return

    tile = gl.allocate_shared_memory(gl.float8e4nv, [PARTS, PART, DIM], k.layout)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, DIM], q.layout)
    ring = gl.allocate_shared_memory(
        gl.float32, [STAGES, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    place = gl.arange(0, PART, gl.SliceLayout(1, SCORE))
    scales = ()
    mbarrier.expect(ready.index(STAGES), KEYS * DIM)
    for part in gl.static_range(PARTS):
        first = first_key + part * PART
        tma.async_copy_global_to_shared(k, [first, 0], ready.index(STAGES), tile.index(part))
        scaled = first + place
        scale = gl.load(k_scale + scaled, mask=scaled < keys, other=0.0)
        scales += (scale,)  # type: ignore[assignment]
    for stage in gl.static_range(STAGES):
        _copy_rows(
            q, weights, low + stage * ROWS, high, queries.index(stage), ring.index(stage),
            ready.index(stage), HEADS, num_warps,
        )  # fmt: skip
    async_copy.wait_group(STAGES - 1)
    gl.thread_barrier()
    mbarrier.wait(ready.index(STAGES), 0)
    g = gl.arange(0, ROWS, gl.SliceLayout(0, SCORE))
    stage = 0
    phase = 0
    for row in range(low, high, ROWS):
        mbarrier.wait(ready.index(stage), phase)
        products = _multiply(tile.index(0), queries.index(stage), PRODUCT)
        weight = ring.index(stage).load(gl.SliceLayout(0, PRODUCT))
        of_group = row + g < high
        start = gl.load(row_start + row + g, mask=of_group, other=0)
        end = gl.load(row_end + row + g, mask=of_group, other=0)
        to = out + (row + g).to(gl.int64) * out_row
        if not FILL:
            end = gl.minimum(end, keys)
        for part in gl.static_range(PARTS):
            if OVERLAP and part + 1 < PARTS:
                following = _multiply(tile.index(part + 1), queries.index(stage), PRODUCT)
                products = warpgroup_mma_wait(1, deps=[products])
            else:
                products = warpgroup_mma_wait(0, deps=[products])
            if part + 1 == PARTS:
                # No warp needs these queries any more: their buffer takes the next that come.
                async_copy.wait_group(STAGES - 2)
                gl.thread_barrier()
                _copy_rows(
                    q, weights, row + STAGES * ROWS, high, queries.index(stage),
                    ring.index(stage), ready.index(stage), HEADS, num_warps,
                )  # fmt: skip
            score = _sum_heads(products, weight, ROWS, HEADS, num_warps) * scales[part][:, None]
            if part + 1 < PARTS:
                if OVERLAP:
                    products = following
                else:
                    products = _multiply(tile.index(part + 1), queries.index(stage), PRODUCT)
            key = (first_key + part * PART + place)[:, None]
            seen = (key >= start[None, :]) & (key < end[None, :])
            if FILL:
                score = gl.where(seen, score, float("-inf"))
                seen = (key < keys) & of_group[None, :]
            gl.store(to[None, :] + key, score, mask=seen)
        phase = gl.where(stage + 1 == STAGES, phase ^ 1, phase)
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    async_copy.wait_group(0)


def operand(rows: Tensor, block: int) -> TensorDescriptor:
    """float8_e4m3fn [n, dim], dim at most 128, as the kernel takes it, `block` rows at a time."""
    dim = rows.shape[1]
    rows = rows.as_strided(rows.shape, (dim, 1))  # a single row is contiguous with any stride
    return TensorDescriptor.from_tensor(rows, [block, dim], _layout(dim))


@lru_cache
def _layout(dim: int) -> gl.NVMMASharedLayout:
    """Shared memory as the matrix instructions want rows of `dim` bytes."""
    return gl.NVMMASharedLayout(dim, 8, 2)
