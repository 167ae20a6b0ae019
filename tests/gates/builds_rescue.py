"""What is compiled of the rescue behind a wait, alone and with the hand-back."""

from dataclasses import replace

from attention_worker.answer_or_rescue import most_registers
from indexer_service.kernels.architecture import HOPPER, native_fp8
from indexer_service.kernels.mqa_logits import paged_plan
from tests.gates.kernels import ARCHITECTURES, Build

_POINTERS = dict(
    q="*u8", cache="*u8", weights="*fp32", seq_lens="*i32", table="*i32", scores="*fp32",
    enabled="*i32", out="*i32",
)  # fmt: skip
_NUMBERS = dict.fromkeys(("heads", "pages", "limit", "k"), "i32") | dict.fromkeys(
    ("page_stride", "weight_row", "weight_head", "table_row", "table_column", "score_row",
     "out_stride"), "i64",
)  # fmt: skip


def _rescue(heads: int, next_n: int, page: int, align: int, arch: int) -> Build:
    columns = paged_plan.columns(heads, next_n)
    return Build(
        f"rescue heads {heads} next_n {next_n} page {page} align {align}",
        "indexer_service.kernels.indexer.rescue:rescue_kernel",
        _POINTERS | _NUMBERS,
        dict(NEXT_N=next_n, ROWS=columns.rows, GROUPS=columns.groups, HEADS=columns.heads, D=128,
             PAGE=page, PADDED=128, BLOCK_N=64, STAGES=2, BLOCK=2048, ALIGN=align,
             NATIVE=native_fp8(arch), ASSEMBLY=True, PDL=arch >= HOPPER),
        dict(num_warps=4), (arch,), unaligned=("cache", "weights", "seq_lens", "table", "enabled",
                                               "out"),
    )  # fmt: skip


def _or_answer(rescue: Build) -> Build:
    return replace(
        rescue,
        name=f"answer or {rescue.name}",
        kernel="attention_worker.answer_or_rescue:answer_or_rescue_kernel",
        types=rescue.types
        | dict(state="*i64", decision="*i32", found="*i64", entries="*i64", ordinal="i32"),
        constants=rescue.constants | dict(K=2048, BACK=2048, VECTOR=16, CHECKED=True),
        options=rescue.options | dict(maxnreg=most_registers(rescue.architectures[0])),
    )


_RESCUES = [
    _rescue(heads, next_n, page, align, arch)
    for arch in ARCHITECTURES
    for heads, next_n, page, align in ((64, 1, 64, 16), (32, 2, 64, 16), (128, 1, 64, 16))
]
BUILDS = [*_RESCUES, *map(_or_answer, _RESCUES)]
