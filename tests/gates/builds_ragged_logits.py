"""What is compiled of ragged MQA logits: all configurations that an architecture may use."""

from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from indexer_service.kernels.architecture import native_fp8
from indexer_service.kernels.mqa_logits import ragged_plan
from indexer_service.kernels.mqa_logits.ragged_plan import MOST_BLOCK_ROWS, Configuration
from tests.gates.kernels import ARCHITECTURES, Build

_HERE = "indexer_service.kernels.mqa_logits"
_TYPES = dict(
    k_scale="*fp32", weights="*fp32", row_start="*i32", row_end="*i32", out="*fp32",
    enabled="*i32", rows="i32", keys="i32", block_rows="i32", out_row="i64",
)  # fmt: skip
_UNALIGNED = ("k_scale", "row_start", "row_end", "out", "enabled")


def _score(chosen: Configuration, heads: int, fill: bool, architectures: tuple[int, ...]) -> Build:
    native = native_fp8(architectures[0])
    types = _TYPES | (dict(q="*fp8e4nv", k="*fp8e4nv") if native else dict(q="*fp16", k="*fp16"))
    constants: dict[str, Any] = dict(
        HEADS=heads, DIM=128, ROWS=chosen.rows(heads), STAGES=chosen.stages,
        MOST_ROWS=MOST_BLOCK_ROWS, FILL=fill,
    )  # fmt: skip
    if chosen.form == "hopper":
        part = 16 * chosen.warps
        types |= dict(q=_operand(chosen.rows(heads) * heads), k=_operand(part))
        constants |= dict(PARTS=chosen.keys // part, num_warps=chosen.warps)
        constants |= dict(OVERLAP=chosen.overlap)
        kernel = f"{_HERE}.ragged_hopper:hopper_kernel"
    else:
        types |= dict(begin="i32")
        constants |= dict(KEYS=chosen.keys, DECODED=not native)
        kernel = f"{_HERE}.ragged_tile:ragged_kernel"
    return Build(
        f"ragged logits {heads} heads {chosen}", kernel, types, constants,
        dict(num_warps=chosen.warps), architectures, _UNALIGNED,
    )  # fmt: skip


def _operand(rows: int) -> str:
    """The type of what `ragged_hopper.operand` makes."""
    return f"tensordesc<fp8e4nv[{rows}, 128],{NVMMASharedLayout(128, 8, 2)!r}>"


def _groups() -> dict[tuple[bool, tuple[Configuration, ...]], tuple[int, ...]]:
    """Architectures that use the same configurations in the same form."""
    groups: dict[tuple[bool, tuple[Configuration, ...]], tuple[int, ...]] = {}
    for arch in ARCHITECTURES:
        kind = (native_fp8(arch), ragged_plan.configurations(arch, 64, 128))
        groups[kind] = (*groups.get(kind, ()), arch)
    return groups


BUILDS = [
    *(
        _score(chosen, heads, fill, architectures)
        for (_, configurations), architectures in _groups().items()
        for chosen in configurations
        for heads, fill in ((64, False), (64, True), (16, False), (128, False))
    ),
    Build(
        "decoded codes", f"{_HERE}.decoded:decode_kernel",
        dict(codes="*u8", out="*fp16", enabled="*i32", vectors="i32"),
        dict(BLOCK=256, VECTOR=16, PACKED=True),
        dict(num_warps=4), tuple(arch for arch in ARCHITECTURES if not native_fp8(arch)),
        ("enabled",),
    ),
]  # fmt: skip
