"""What is compiled of the paged logits: every configuration that an architecture may choose."""

from typing import Any

from indexer_service.kernels.architecture import HOPPER, native_fp8
from indexer_service.kernels.mqa_logits import paged_plan
from indexer_service.kernels.mqa_logits.packed import PADDING
from indexer_service.kernels.mqa_logits.paged_plan import Configuration
from tests.gates.kernels import ARCHITECTURES, Build

_HERE = "indexer_service.kernels.mqa_logits"
_PAGE = 64
_PACKED = dict(row_at="*i64", row_end="*i32", arrived="*i32", enabled="*i32")
_CACHE = dict(cache="*u8", pages="i32", page_stride="i64")
_TYPES = dict(
    q="*u8", weights="*fp32", seq_lens="*i32", table="*i32", scores="*fp32"
) | dict.fromkeys(("batch", "heads", "limit", "back"), "i32") | dict.fromkeys(
    ("span", "window", "weight_row", "weight_head", "length_request", "length_row", "table_row",
     "table_column", "score_row"), "i64",
)  # fmt: skip


def paged_build(
    chosen: Configuration, heads: int, next_n: int, arch: int, *, native: bool, packed: bool = True
) -> Build:
    columns = paged_plan.columns(heads, next_n)
    constants: dict[str, Any] = dict(
        NEXT_N=next_n, LENGTHS=next_n, HEADS=columns.heads, PAGE=_PAGE, PADDING=PADDING,
        PROGRAMS=132 * chosen.programs, BLOCK_N=chosen.block_keys,
        STAGES=chosen.stages,
    ) | ({} if packed else dict.fromkeys(_PACKED))  # fmt: skip
    types = _TYPES | (_PACKED if packed else {})
    if chosen.kernel == "hopper":
        box = min(_PAGE, chosen.block_keys)
        layout = "NVMMASharedLayout(swizzle_byte_width={}, element_bitwidth={}, rank={})"
        types = types | dict(
            keys_map=f"tensordesc<fp8e4nv[1, {box}, 128],{layout.format(128, 8, 3)}>",
            scales_map=f"tensordesc<fp32[1, {box}],{layout.format(0, 32, 2)}>",
        )
        constants |= dict(num_warps=chosen.warps)
    else:
        types = types | _CACHE
        constants |= dict(
            ROWS=columns.rows, GROUPS=columns.groups, D=128, ALIGN=16, NATIVE=native,
            ASSEMBLY=True, PDL=arch >= HOPPER,
        )  # fmt: skip
    unaligned = tuple(name for name, kind in types.items() if kind[0] == "*" and name != "q")
    form = "e4m3" if native else "fp16"
    return Build(
        f"paged logits {form}, {heads} heads, {next_n} rows, packed {packed}, {chosen}",
        f"{_HERE}.paged_{chosen.kernel}:{chosen.kernel}_kernel", types, constants,
        dict(num_warps=chosen.warps), (arch,), unaligned=unaligned,
    )  # fmt: skip


def _builds(arch: int) -> list[Build]:
    native = native_fp8(arch)
    builds = []
    for heads, next_n, packed in ((64, 1, True), (32, 2, False), (64, 4, True), (128, 1, False)):
        columns = paged_plan.columns(heads, next_n)
        for chosen in paged_plan.configurations(arch, columns.heads, next_n, tensor_maps=True):
            builds.append(paged_build(chosen, heads, next_n, arch, native=native, packed=packed))
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
