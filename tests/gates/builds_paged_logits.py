"""What is compiled of the paged logits: every configuration that an architecture may choose."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from indexer_service.kernels.architecture import HOPPER, native_fp8
from indexer_service.kernels.mqa_logits import paged_plan
from indexer_service.kernels.mqa_logits.packed import PADDING
from indexer_service.kernels.mqa_logits.paged_plan import Configuration
from tests.gates.kernels import ARCHITECTURES, Build

_HERE = "indexer_service.kernels.mqa_logits"
_HEADS = (16, 32, 64, 128)
_NEXT_N = range(1, 9)
_PACKED = dict(row_at="*i64", row_end="*i32", arrived="*i32", enabled="*i32")
_CACHE = dict(cache="*u8", pages="i32", page_stride="i64")
_TYPES = dict(
    q="*u8", weights="*fp32", seq_lens="*i32", table="*i32", scores="*fp32"
) | dict.fromkeys(("batch", "heads", "limit", "back"), "i32") | dict.fromkeys(
    ("span", "window", "weight_row", "weight_head", "length_request", "length_row", "table_row",
     "table_column", "score_row"), "i64",
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """What a call decides beside heads and rows, and no configuration depends on."""

    page: int = 64
    align: int = 16
    """Bytes that the cache's keys are aligned to."""
    by_row: bool = True
    """A length for each row, or one a request."""
    packed: bool = True
    settled: bool = False
    """Whether the kernel may return before the one ahead of it ends."""


_OTHERS = (
    (1, Form(page=128)), (2, Form(page=32, by_row=False)), (4, Form(align=4)),
    (1, Form(page=32, align=4, packed=False)), (1, Form(settled=True)),
)  # fmt: skip
"""Rows a request, and forms in which few shapes are compiled; all are in the usual one."""


def paged_build(
    chosen: Configuration, heads: int, next_n: int, arch: int, form: Form = Form()
) -> Build:
    native = native_fp8(arch)
    columns = paged_plan.columns(heads, next_n)
    constants: dict[str, Any] = dict(
        NEXT_N=next_n, LENGTHS=next_n if form.by_row else 1, HEADS=columns.heads, PAGE=form.page,
        PADDING=PADDING, PROGRAMS=132 * chosen.programs, BLOCK_N=chosen.block_keys,
        STAGES=chosen.stages, SETTLED=form.settled,
    ) | ({} if form.packed else dict.fromkeys(_PACKED))  # fmt: skip
    types = _TYPES | (_PACKED if form.packed else {})
    if chosen.kernel == "hopper":
        box = min(form.page, chosen.block_keys)
        layout = "NVMMASharedLayout(swizzle_byte_width={}, element_bitwidth={}, rank={})"
        types = types | dict(
            keys_map=f"tensordesc<fp8e4nv[1, {box}, 128],{layout.format(128, 8, 3)}>",
            scales_map=f"tensordesc<fp32[1, {box}],{layout.format(0, 32, 2)}>",
        )
        constants |= dict(num_warps=chosen.warps)
    else:
        types = types | _CACHE
        constants |= dict(
            ROWS=columns.rows, GROUPS=columns.groups, D=128, ALIGN=form.align, NATIVE=native,
            ASSEMBLY=True, PDL=arch >= HOPPER,
        )  # fmt: skip
    unaligned = tuple(name for name, kind in types.items() if kind[0] == "*" and name != "q")
    codes = "e4m3" if native else "fp16"
    return Build(
        f"paged logits {codes}, {heads} heads, {next_n} rows, {form}, {chosen}",
        f"{_HERE}.paged_{chosen.kernel}:{chosen.kernel}_kernel", types, constants,
        dict(num_warps=chosen.warps), (arch,), unaligned=unaligned,
    )  # fmt: skip


def _configurations(arch: int, heads: int, next_n: int, form: Form) -> tuple[Configuration, ...]:
    padded = paged_plan.columns(heads, next_n).heads
    return paged_plan.configurations(arch, padded, next_n, tensor_maps=form.align == 16)


def _shapes(arch: int) -> list[tuple[Configuration, int, int]]:
    """Configurations with heads and rows a request; of kernels that differ in nothing but how
    often something is repeated, the one with the most rows.
    """
    most: dict[Hashable, tuple[Configuration, int, int]] = {}
    for heads, next_n in product(_HEADS, _NEXT_N):
        for chosen in _configurations(arch, heads, next_n, Form()):
            columns = paged_plan.columns(heads, next_n)
            kind = columns.rows if chosen.kernel == "portable" else next_n == 1
            same = (columns.heads, kind, replace(chosen, programs=0))
            most[same] = (chosen, heads, next_n)
    return list(most.values())


def _builds(arch: int) -> list[Build]:
    builds = [paged_build(*shape, arch) for shape in _shapes(arch)]
    for next_n, form in _OTHERS:
        best = _configurations(arch, 64, next_n, form)[0]
        builds.append(paged_build(best, 64, next_n, arch, form))
    return builds


BUILDS = [build for arch in ARCHITECTURES for build in _builds(arch)]
BUILDS.append(
    Build(
        "paged logits, tails", f"{_HERE}.paged_tails:tails_kernel",
        dict(out="*fp32", seq_lens="*i32", next_n="i32", limit="i32", context="i32",
             out_row="i64", length_request="i64", length_row="i64", back="i32"),
        dict(BLOCK=2048), dict(num_warps=4), unaligned=("out", "seq_lens"),
    )
)  # fmt: skip
