"""Paged scores on SM90 with native e4m3, for caches that tensor maps can describe.

As `paged_portable`, but in Gluon, Triton's lower level. The copy engine fetches whole pages into a
ring of tiles, also across requests, so that memory never waits for a request to end; the next
request's queries are on their way meanwhile. A matrix product runs while the scores of the one
before are finished. Pages outside the cache need no care: there the engine delivers zeros for keys
and NaN for scales.
"""

import torch
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from indexer_service.kernels.mqa_logits.paged_heads import twice_weighted_sum
from indexer_service.kernels.mqa_logits.paged_portable import UNALIGNED, UNSPECIALISED
from indexer_service.kernels.mqa_logits.paged_share import (
    LENGTHS_AT_ONCE,
    row_length,
    seeing_request,
    share,
)

D = 128
"""The only head size that this kernel serves."""

_D = gl.constexpr(D)


@gluon.constexpr_function
def keys_layout():
    """A page's keys in shared memory as copied, and as the matrix instructions read them."""
    return gl.NVMMASharedLayout(128, 8, 3)


@gluon.constexpr_function
def scales_layout():
    return gl.NVMMASharedLayout(0, 32, 2)


@gluon.constexpr_function
def box(page, block_keys):
    """Keys that one copy fetches."""
    return min(page, block_keys)


@gluon.jit
def _fetch(
    keys_map, scales_map, table, request, table_row, table_column, tile, longest, boxes,
    scale_boxes, stage, full, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Start copying a tile's keys and scales."""
    PARTS: gl.constexpr = BLOCK_N // BOX
    barrier = full.index(stage)
    row_of_table = table + tl.cast(request, tl.int64) * table_row
    mbarrier.expect(barrier, BLOCK_N * (_D + 4))
    for part in gl.static_range(PARTS):
        to = stage * PARTS + part
        position = tile * BLOCK_N + part * BOX
        page = row_of_table + (position // PAGE).to(gl.int64) * table_column
        page = gl.load(page, mask=position < longest, other=-1)
        tma.async_copy_global_to_shared(
            keys_map, [page, position % PAGE, 0], barrier, boxes.index(to)
        )
        tma.async_copy_global_to_shared(
            scales_map, [page, position % PAGE], barrier, scale_boxes.index(to)
        )


@gluon.jit
def _advance(
    seq_lens, request, tile, longest, tiles, left, batch, length_request, length_row, limit,
    LENGTHS: gl.constexpr, PADDING: gl.constexpr, PER_UNIT: gl.constexpr,
):  # fmt: skip
    """The tile after this one, maybe of a later request."""
    tile += 1
    left -= 1
    if (tile == tiles) & (left > 0):
        tile = 0
        request, longest = seeing_request(
            seq_lens, request + 1, batch, length_request, length_row, limit, LENGTHS
        )  # fmt: skip
        tiles = gl.cdiv(longest, PADDING) * PER_UNIT
    return request, tile, longest, tiles, left


@gluon.jit
def _copy_queries(
    q, weights, request, slot, heads, weight_row, weight_head, queries, head_weights,
    NEXT_N: gl.constexpr, HEADS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Start copying a request's queries and weights; heads that pad get zeros."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    head = gl.arange(0, HEADS, gl.SliceLayout(1, LOAD))
    d = gl.arange(0, _D, gl.SliceLayout(0, LOAD))[None, :]
    column = gl.arange(0, HEADS, LINE)
    for j in gl.static_range(NEXT_N):
        row = tl.cast(request, tl.int64) * NEXT_N + j
        query = gl.multiple_of((row * heads + head) * _D, 16)
        async_copy.async_copy_global_to_shared(
            queries.index(slot * NEXT_N + j), q + query[:, None] + d, mask=(head < heads)[:, None]
        )  # fmt: skip
        async_copy.async_copy_global_to_shared(
            head_weights.index(slot * NEXT_N + j),
            weights + row * weight_row + column * weight_head, mask=column < heads,
        )  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def _start(keys, queries, nothing):
    """Start the matrix product of a tile's keys and one row's heads."""
    return warpgroup_mma(keys, queries.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_kernel(
    q, keys_map, scales_map, weights, seq_lens, table, scores, row_at, row_end, arrived, enabled,
    batch, heads, limit, span: gl.int64, window: gl.int64,
    weight_row: gl.int64, weight_head: gl.int64, length_request: gl.int64, length_row: gl.int64,
    back, table_row: gl.int64, table_column: gl.int64, score_row: gl.int64,
    NEXT_N: gl.constexpr, LENGTHS: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr,
    PADDING: gl.constexpr, PROGRAMS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SETTLED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """As `paged_portable.portable_kernel`, with one matrix product a row.

    keys_map: e4m3 [pages, page, 128]; scales_map: fp32 [pages, page].
    """
    if SETTLED:
        # Who comes next waits by itself, and must not come late because of a look at memory.
        gdc_launch_dependents()
        if gl.load(enabled, volatile=True) == 0:
            return
    PER_UNIT: gl.constexpr = PADDING // BLOCK_N
    BOX: gl.constexpr = box(PAGE, BLOCK_N)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, HEADS, 32])
    BOXES: gl.constexpr = STAGES * BLOCK_N // BOX
    boxes = gl.allocate_shared_memory(gl.float8e4nv, [BOXES, 1, BOX, _D], keys_layout())
    scale_boxes = gl.allocate_shared_memory(gl.float32, [BOXES, 1, BOX], scales_layout())
    keys = boxes._reinterpret(gl.float8e4nv, [STAGES, BLOCK_N, _D], TILE)
    scales = scale_boxes._reinterpret(gl.float32, [STAGES, BLOCK_N], PLAIN)
    # With two slots the next request's queries come while this one's are multiplied. For more rows
    # a request the memory is worth more than that.
    SLOTS: gl.constexpr = 2 if NEXT_N == 1 else 1
    query_codes = gl.allocate_shared_memory(gl.uint8, [SLOTS * NEXT_N, HEADS, _D], TILE)
    queries = query_codes._reinterpret(gl.float8e4nv, [SLOTS * NEXT_N, HEADS, _D], TILE)
    head_weights = gl.allocate_shared_memory(gl.float32, [SLOTS * NEXT_N, HEADS], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    gl.thread_barrier()
    gdc_wait()
    gdc_launch_dependents()
    if enabled is not None:  # noqa: SIM102 - decided when compiling
        if gl.load(enabled) == 0:
            return

    # Every warp reads all of the lengths, so that none waits for another.
    BATCH: gl.constexpr = gl.BlockedLayout([LENGTHS_AT_ONCE // 32], [32], [num_warps], [0])
    begin, end, request, at = share(
        gl.arange(0, LENGTHS_AT_ONCE, BATCH), seq_lens, row_at, row_end, arrived, batch, limit,
        span, window, length_request, length_row, back, NEXT_N, LENGTHS, PER_UNIT, PADDING,
        PROGRAMS,
    )  # fmt: skip
    if begin == end:
        return
    request, longest = seeing_request(
        seq_lens, request, batch, length_request, length_row, limit, LENGTHS
    )  # fmt: skip

    # The copying side runs STAGES tiles ahead, with its own place in the batch.
    copy_request = request
    copy_tile = begin - at * PER_UNIT
    copy_longest = longest
    copy_tiles = gl.cdiv(longest, PADDING) * PER_UNIT
    left = end - begin
    for stage in range(gl.minimum(left, STAGES)):
        _fetch(
            keys_map, scales_map, table, copy_request, table_row, table_column, copy_tile,
            copy_longest, boxes, scale_boxes, stage, full, PAGE, BLOCK_N, BOX,
        )  # fmt: skip
        copy_request, copy_tile, copy_longest, copy_tiles, left = _advance(
            seq_lens, copy_request, copy_tile, copy_longest, copy_tiles, left, batch,
            length_request, length_row, limit, LENGTHS, PADDING, PER_UNIT,
        )  # fmt: skip
    slot = 0
    _copy_queries(
        q, weights, request, slot, heads, weight_row, weight_head, query_codes, head_weights,
        NEXT_N, HEADS, num_warps,
    )  # fmt: skip
    copied = request

    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PRODUCTS))
    nothing = gl.zeros([BLOCK_N, HEADS], gl.float32, PRODUCTS)
    stage = 0
    phase = 0
    tile = begin
    while tile < end:
        units = gl.cdiv(longest, PADDING)
        first = tile - at * PER_UNIT
        stop = gl.minimum(units * PER_UNIT, first + end - tile)
        row = tl.cast(request, tl.int64) * NEXT_N
        if copied != request:
            async_copy.wait_group(0)
            gl.thread_barrier()
            _copy_queries(
                q, weights, request, slot, heads, weight_row, weight_head, query_codes,
                head_weights, NEXT_N, HEADS, num_warps,
            )  # fmt: skip
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        weight = head_weights.index(slot * NEXT_N).load(gl.SliceLayout(0, PRODUCTS))
        if SLOTS == 2 and tile + stop - first < end:
            # Most likely the next request sees a key, too.
            copied = gl.minimum(request + 1, batch - 1)
            _copy_queries(
                q, weights, copied, 1 - slot, heads, weight_row, weight_head, query_codes,
                head_weights, NEXT_N, HEADS, num_warps,
            )  # fmt: skip
        if row_at is not None:
            to = scores + (tl.cast(at, tl.int64) * NEXT_N * PADDING - window * span)
            row_step = units.to(gl.int64) * PADDING
        else:
            to = scores + row * score_row
            row_step = score_row

        for i in range(first, stop):
            mbarrier.wait(full.index(stage), phase)
            block = keys.index(stage)
            scale = scales.index(stage).load(gl.SliceLayout(1, PRODUCTS))
            position = i * BLOCK_N + n
            running = _start(block, queries.index(slot * NEXT_N), nothing)
            for j in gl.static_range(NEXT_N):
                if j + 1 < NEXT_N:
                    # One row's scores are finished while the next one's product runs.
                    following = _start(block, queries.index(slot * NEXT_N + j + 1), nothing)
                    products = warpgroup_mma_wait(1, deps=[running])
                    running = following
                else:
                    products = warpgroup_mma_wait(0, deps=[running])
                    gl.thread_barrier()
                    if left > 0:
                        _fetch(
                            keys_map, scales_map, table, copy_request, table_row, table_column,
                            copy_tile, copy_longest, boxes, scale_boxes, stage, full, PAGE,
                            BLOCK_N, BOX,
                        )  # fmt: skip
                        copy_request, copy_tile, copy_longest, copy_tiles, left = _advance(
                            seq_lens, copy_request, copy_tile, copy_longest, copy_tiles, left,
                            batch, length_request, length_row, limit, LENGTHS, PADDING, PER_UNIT,
                        )  # fmt: skip
                if NEXT_N > 1:
                    weight = head_weights.index(slot * NEXT_N + j).load(gl.SliceLayout(0, PRODUCTS))
                score = gl.reshape(twice_weighted_sum(products, weight, 1, HEADS), [BLOCK_N])
                score = gl.convert_layout(score, gl.SliceLayout(1, PRODUCTS)) * 0.5 * scale
                if row_at is not None:
                    # The keys that stream through must not drive scores out of the L2 cache.
                    gl.store(to + j * row_step + position, score, eviction_policy="evict_last")
                else:
                    length = row_length(
                        seq_lens, request, j, True, length_request, length_row, back, limit, NEXT_N
                    )  # fmt: skip
                    gl.store(to + j * row_step + position, score, mask=position < length)
            stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
            phase = gl.where(stage == 0, phase ^ 1, phase)

        # (Were lengths to change meanwhile, this must end all the same.)
        tile = gl.where(first < stop, tile + stop - first, end)
        if tile < end:
            at += units
            slot = SLOTS - 1 - slot
            request, longest = seeing_request(
                seq_lens, request + 1, batch, length_request, length_row, limit, LENGTHS
            )  # fmt: skip
    async_copy.wait_group(0)


def tensor_maps(k_cache: Tensor, block_keys: int) -> dict[str, TensorDescriptor]:
    """keys_map and scales_map of a K cache whose address and stride(0) are multiples of 16."""
    pages, page, width = k_cache.shape
    keys = box(page, block_keys)
    planes = k_cache.as_strided((pages, page * width), (k_cache.stride(0), 1))
    values = planes.view(torch.float8_e4m3fn)
    values = values.as_strided((pages, page, D), (k_cache.stride(0), D, 1))
    scales = planes.view(torch.float32)[:, page * D // 4 :]
    return dict(
        keys_map=TensorDescriptor.from_tensor(values, [1, keys, D], keys_layout()),
        scales_map=TensorDescriptor.from_tensor(scales, [1, keys], scales_layout(), "nan"),
    )
