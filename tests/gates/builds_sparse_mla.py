"""What is compiled of sparse_mla."""

from typing import Any

from attention_worker.kernels.sparse_mla import plan
from indexer_service.kernels.architecture import native_fp8
from tests.gates.kernels import ARCHITECTURES, Build

_HERE = "attention_worker.kernels.sparse_mla"
_NUMBERS = dict.fromkeys(
    ("heads", "k", "per_split", "splits", "last_slot", "page"), "i32"
) | dict.fromkeys(
    ("block_stride", "token_stride", "latent_token", "latent_head", "rope_token", "rope_head",
     "slots_token", "out_token", "out_head"), "i64",
)  # fmt: skip
_COUNTS = dict.fromkeys(
    ("indices_token", "indices_place", "request_stride", "table_row", "table_column", "columns",
     "page", "pages"), "i64",
)  # fmt: skip


def _types(cache: str) -> dict[str, str]:
    value = "*bf16" if cache == "*u8" else cache
    pointers = dict(latent=value, rope=value, cache=cache, slots="*i32", out=value, lse="*fp32")
    return pointers | dict(partial=value, partial_lse="*fp32", scale="fp32") | _NUMBERS


def _attend(
    heads: int, tokens: int, cache: str, architectures: tuple[int, ...], invariant: bool = False
) -> Build:
    """The kernel that `plan` chooses for a shape on these architectures."""
    fp8 = cache == "*u8"
    chosen = plan.choose(
        tokens, heads, 2048, arch=architectures[0], processors=132, fp8=fp8, aligned=True,
        splits=None, invariant=invariant,
    )  # fmt: skip
    constants: dict[str, Any] = dict(
        BLOCK_H=chosen.block_heads, BLOCK_N=chosen.block_tokens, PAGED=False,
        SINGLE=chosen.splits == 1, PDL=architectures[0] >= 90,
    )  # fmt: skip
    types, options = _types(cache), dict(num_warps=chosen.warps)
    if chosen.form != "fp8":
        constants |= dict(ROPE=True)  # fp8 tokens always have it
    if chosen.form == "portable":
        kernel = f"{_HERE}.split:split_kernel"
        native = native_fp8(architectures[0])
        constants |= dict(STAGES=chosen.buffers, FP8=fp8, NATIVE=native, VECTOR=16 if fp8 else 8)
    else:
        kernel = f"{_HERE}.hopper_{chosen.form}:{chosen.form}_kernel"
        types |= dict(per_program="i32")
        constants |= dict(num_warps=chosen.warps)
    if chosen.form in ("narrow", "fp8"):
        constants |= dict(BUFFERS=chosen.buffers, FOLD=chosen.fold)
    if chosen.form == "fp8" and chosen.block_heads == 16:
        options |= dict(maxnreg=128)
    return Build(
        f"attend {heads} heads {tokens} tokens {cache}{' invariant' if invariant else ''}",
        kernel, types, constants, options, architectures, unaligned=("slots", "lse"),
    )  # fmt: skip


def _spread(cache: str, columns: int) -> list[Build]:
    """The two kernels of few tokens of more than 32 heads, batch-invariant."""
    chosen = plan.choose(
        1, 128, 2048, arch=90, processors=132, fp8=False, aligned=True, splits=None, invariant=True
    )
    assert chosen.form == "spread"
    here = f"{_HERE}.hopper_spread"
    types = _types(cache) | dict(scores="*fp32")
    sizes: dict[str, Any] = dict(
        BLOCK_H=chosen.block_heads, BLOCK_N=chosen.block_tokens, PAGED=False,
        num_warps=chosen.warps,
    )  # fmt: skip
    outputs = dict(COLUMNS=columns, BUFFERS=chosen.buffers, SINGLE=False)
    without = ("latent", "rope", "scale", "latent_token", "latent_head", "rope_token", "rope_head")
    also_without = ("out", "lse", "partial", "partial_lse", "per_split", "splits")
    also_without += ("out_token", "out_head")
    options = dict(num_warps=chosen.warps)
    return [
        Build(
            f"attend few tokens, scores, {cache}", f"{here}:scores_kernel",
            {name: kind for name, kind in types.items() if name not in also_without},
            sizes | dict(ROPE=True), options, (90,), unaligned=("slots",),
        ),
        Build(
            f"attend few tokens, {columns} columns of the output, {cache}",
            f"{here}:outputs_kernel",
            {name: kind for name, kind in types.items() if name not in without},
            sizes | outputs, options, (90,), unaligned=("slots", "lse"),
        ),
    ]  # fmt: skip


def _merge(
    rows: int, splits: int, invariant: bool, dependent: bool, architectures: tuple[int, ...]
) -> Build:
    types = dict(out="*bf16", lse="*fp32", partial="*bf16", partial_lse="*fp32", heads="i32")
    kind = plan.merge_kind(rows, splits)
    assert kind is not None
    room, columns, warps = kind
    return Build(
        f"merge {splits} splits of {rows} rows{' in order' if invariant else ''}",
        f"{_HERE}.merge:merge_kernel", types | dict(splits="i32", out_token="i64", out_head="i64"),
        dict(MAX_SPLITS=room, COLUMNS=columns, IN_ORDER=invariant, PDL=dependent),
        dict(num_warps=warps, maxnreg=plan.merge_registers(room)), architectures,
        unaligned=("lse",),
    )  # fmt: skip


_OLD = tuple(arch for arch in ARCHITECTURES if arch < 89)
_FP8 = tuple(arch for arch in ARCHITECTURES if arch == 89)
_NEW = tuple(arch for arch in ARCHITECTURES if arch > 90)

BUILDS = [
    *(
        _attend(heads, tokens, cache, group)
        for group in (_OLD, _FP8, _NEW)
        for heads, tokens, cache in (
            (16, 64, "*bf16"), (128, 64, "*bf16"), (16, 64, "*u8"), (128, 64, "*u8"),
        )
    ),
    *(
        _attend(heads, tokens, cache, (90,), invariant)
        for heads, tokens, cache, invariant in (
            (16, 64, "*bf16", False), (16, 512, "*bf16", False), (32, 8, "*bf16", False),
            (128, 64, "*fp16", False), (16, 64, "*u8", False), (32, 64, "*u8", False),
            (128, 64, "*u8", False), (16, 132, "*bf16", True), (16, 512, "*bf16", True),
            (32, 512, "*bf16", True), (16, 512, "*u8", True),
        )
    ),
    *_spread("*bf16", plan.SPREAD_COLUMNS),
    *(
        _merge(rows, splits, invariant, dependent, group)
        for dependent, group in ((False, _OLD + _FP8), (True, (90, *_NEW)))
        for rows, splits, invariant in (
            (16, 64, False), (1024, 16, False), (16, 16, True), (1024, 16, True),
        )
    ),
    Build(
        "to_slots", f"{_HERE}.slots_map:to_slots_kernel",
        dict(indices="*i32", request_of_token="*i32", block_table="*i32", slots="*i32",
             count="*i32", k="i32", requests="i32") | _COUNTS,
        dict(COUNT=True, BLOCK=1024), dict(num_warps=4),
    ),
]  # fmt: skip
