"""Faults in the Gluon kernels' own source, and what the gate must say of each.

Names of runs are those of the lists of runs; `planting.py` does it.
"""

from dataclasses import dataclass
from functools import partial

_SPARSE_MLA = "attention_worker.kernels.sparse_mla"
_LOGITS = "indexer_service.kernels.mqa_logits"


@dataclass(frozen=True)
class Fault:
    """A text of a module's source, and what is put in its place."""

    module: str
    run: str
    """The run that fails with it."""
    there: str
    instead: str
    says: str
    """A part of the error."""
    users: tuple[str, ...] = ()
    """Modules that have functions of it."""


_narrow = partial(Fault, f"{_SPARSE_MLA}.hopper_narrow", "sparse_mla in Gluon, narrow, two buffers")
_wide = partial(Fault, f"{_SPARSE_MLA}.hopper_wide", "sparse_mla in Gluon, wide")
_wide_latent = partial(
    Fault, f"{_SPARSE_MLA}.hopper_wide", "sparse_mla in Gluon, wide, no rope part"
)
_spread = partial(
    Fault, f"{_SPARSE_MLA}.hopper_spread", "sparse_mla in Gluon, spread, two blocks in flight"
)
_fp8 = partial(Fault, f"{_SPARSE_MLA}.hopper_fp8", "sparse_mla in Gluon, fp8, 16 heads")
_fp8_products = partial(
    Fault, f"{_SPARSE_MLA}.hopper_fp8_products", "sparse_mla in Gluon, fp8, 16 heads",
    users=(f"{_SPARSE_MLA}.hopper_fp8",),
)  # fmt: skip
_paged = partial(Fault, f"{_LOGITS}.paged_hopper", "paged logits, in Gluon, a long request")
_ragged = partial(Fault, f"{_LOGITS}.ragged_hopper", "ragged logits sm90 overlapping")

_BARRIER = "            gl.thread_barrier()\n"
_FENCE = "            fence_async_shared()\n"

FAULTS: dict[str, Fault] = {
    "narrow: no wait for the gathered block": _narrow(
        "async_copy.wait_group(BUFFERS - 1)", "pass", "nothing orders it after the copy"
    ),
    "narrow: a wait for one group too few": _narrow(
        "async_copy.wait_group(BUFFERS - 1)", "async_copy.wait_group(BUFFERS)",
        "nothing orders it after the copy",
    ),
    "narrow: no fence before the product": _narrow(
        _FENCE + _BARRIER + "            # Zero", _BARRIER + "            # Zero",
        "matrix product",
    ),
    "narrow: the output's product is not waited for": _narrow(
        "acc = warpgroup_mma_wait(0, deps=[acc])", "acc = warpgroup_mma_wait(1, deps=[acc])",
        "warpgroup_mma_wait(1) does not wait",
    ),
    "narrow: a block is gathered over before all warps are done with it": _narrow(
        "deps=[acc])\n" + _BARRIER + "            gather(", "deps=[acc])\n            gather(",
        "nothing orders it after the matrix product",
    ),
    "narrow: an output that keeps its scale": _narrow(
        "acc = acc * rescale[None, :]", "acc = acc * 1.0", "relative error"
    ),
    "narrow: one slot too many": _narrow(
        "end = gl.minimum(last * per_split, k)", "end = gl.minimum(last * per_split, k + 1)",
        "out of bounds",
    ),
    "wide: the gathering warps' phase is wrong": _wide(
        "mbarrier.wait(free.index(buffer), ((i // 2) & 1) ^ 1)",
        "mbarrier.wait(free.index(buffer), (i // 2) & 1)", "everybody waits",
    ),
    "wide: the computing warps' phase is wrong": _wide(
        "mbarrier.wait(full.index(buffer), (i // 2) & 1)",
        "mbarrier.wait(full.index(buffer), ((i // 2) & 1) ^ 1)", "nothing was ever written",
    ),
    "wide: a buffer is gathered over before it is free": _wide(
        "mbarrier.wait(free.index(buffer), ((i // 2) & 1) ^ 1)", "pass",
        "nothing orders it after the",
    ),
    "wide: the other buffer is freed": _wide_latent(
        "            mbarrier.arrive(free.index(i % 2), count=1)\n            i += 1",
        "            mbarrier.arrive(free.index((i + 1) % 2), count=1)\n            i += 1",
        "everybody waits",
    ),
    "wide: a buffer is freed while its product runs": _wide_latent(
        "acc = warpgroup_mma_wait(1, deps=[acc])", "acc = warpgroup_mma_wait(2, deps=[acc])",
        "warpgroup_mma_wait(2) does not wait",
    ),
    "wide: biases are published before all threads have stored them": _wide(
        "        gl.thread_barrier()\n        mbarrier.arrive(full", "        mbarrier.arrive(full",
        "nothing orders it after the store",
    ),
    "wide: a barrier counts one arrival too few": _wide(
        "mbarrier.init(full.index(i), count=32 * _GATHER_WARPS + 1)",
        "mbarrier.init(full.index(i), count=32 * _GATHER_WARPS)",
        "nothing orders it after the store",
    ),
    "spread: scores are read before the kernel that stores them has ended": _spread(
        "    gdc_wait()\n", "", "before gdc_wait"
    ),
    "spread: scores of another block": _spread("        tile += 1\n", "", "relative error"),
    "spread: weights of a block are stored while the last ones are multiplied": _spread(
        "acc = warpgroup_mma_wait(0, deps=[acc])", "acc = warpgroup_mma_wait(1, deps=[acc])",
        "warpgroup_mma_wait(1) does not wait",
    ),
    "fp8: a buffer is freed before it is read": _fp8_products(
        "if group == 3:", "if group == 2:", "nothing orders it after the load"
    ),
    "fp8: codes in another order than their weights": _fp8_products(
        "prmt.b32 $0, $2, $3, 0x6240;", "prmt.b32 $0, $2, $3, 0x6420;", "relative error"
    ),
    "fp8: codes are read as if they lay otherwise": _fp8_products(
        "CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)",
        "CODES: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)", "lies otherwise",
    ),
    "fp8: a promise of alignment that does not hold": _fp8(
        "gl.multiple_of(offset, 16)", "gl.multiple_of(offset, 32)", "of what is none"
    ),
    "fp8: no fence before the products": _fp8(
        _FENCE + "            scores = score_block(", "            scores = score_block(",
        "nothing orders it after the copy",
    ),
    "fp8: weights are multiplied before all threads have stored them": _fp8(
        _FENCE + _BARRIER + "            acc = add_output(", "            acc = add_output(",
        "nothing orders it after the store",
    ),
    "paged: a tile is copied over before all warps have read it": _paged(
        "                    gl.thread_barrier()\n                    if left > 0:",
        "                    if left > 0:", "nothing orders it after the",
    ),
    "paged: no wait for the tile": _paged(
        "mbarrier.wait(full.index(stage), phase)", "pass", "nothing orders it after the tensor copy"
    ),
    "paged: more bytes are expected than come": _paged(
        "mbarrier.expect(barrier, BLOCK_N * (_D + 4))",
        "mbarrier.expect(barrier, BLOCK_N * (_D + 8))", "nobody is left",
    ),
    "paged: queries are used before they are there": _paged(
        "        async_copy.wait_group(0)\n        fence_async_shared()",
        "        fence_async_shared()", "nothing orders it after the copy",
    ),
    "ragged: the phase never turns": _ragged(
        "phase = gl.where(stage + 1 == STAGES, phase ^ 1, phase)", "phase = phase",
        "nobody is left",
    ),
    "ragged: an index of the ring is off by one": _ragged(
        "products = _multiply(tile.index(0), queries.index(stage), PRODUCT)",
        "products = _multiply(tile.index(0), queries.index(stage + 1), PRODUCT)",
        "of shared memory",
    ),
    "ragged: queries are copied over before all warps' products are done": _ragged(
        "async_copy.wait_group(STAGES - 2)\n                gl.thread_barrier()",
        "async_copy.wait_group(STAGES - 2)", "nothing orders it after the matrix product",
    ),
    "narrow: an operation that nobody has written yet": _narrow(
        "            zero = gl.where(ahead < 0, 1, 0)",
        "            rope_keys._keep_alive()\n            zero = gl.where(ahead < 0, 1, 0)",
        "create_local_dealloc is no operation",
    ),
}  # fmt: skip
