"""What is compiled of topk: every configuration, as each architecture runs it."""

from indexer_service.kernels.topk import plan
from indexer_service.kernels.topk.plan import Sizes
from ipc_handoff.kernels.done import tell_layer
from tests.gates.kernels import ARCHITECTURES, Build

_POINTERS = dict(scores="*fp32", row_at="*i64", candidates="*fp32") | dict.fromkeys(
    ("row_start", "row_end", "arrived", "enabled", "out", "counts", "nan"), "*i32"
)
_NUMBERS = dict.fromkeys(("given", "k", "width", "rows", "groups", "skew", "mark"), "i32")
_STRIDES = dict.fromkeys(("scores_stride", "out_stride"), "i64")


_TELLING = ("*i64", "*i32", "*i64", "*i32", "i64", "i64", "i64", "i64", "i64", "i32", "i32")
"""Of `done.telling`."""


def _select(
    sizes: Sizes, architectures: tuple[int, ...], settled: bool = False, tells: bool = False
) -> Build:
    tells_nan = not settled and architectures[0] not in plan.NAN_APART
    return Build(
        f"topk {sizes} settled {settled}" + tells * ", and tells",
        "indexer_service.kernels.topk.kernel:topk_kernel",
        _POINTERS | _NUMBERS | _STRIDES | (dict(epilogue=_TELLING) if tells else {}),
        dict(SMALL=sizes.small, TILE=sizes.tile, CAPACITY=sizes.capacity, BLOCK=sizes.block,
             SAMPLE=sizes.sample,
             MOST_SPLITS=plan.MOST_SPLITS, WARPS=sizes.warps, PTX=True, NAN=tells_nan,
             STREAMS_NAN=tells_nan and sizes.streams_nan, SETTLED=settled,
             PDL=architectures[0] >= 90, EPILOGUE=tell_layer if tells else None)
        | ({} if tells else dict(epilogue=None)),
        dict(num_warps=sizes.warps, maxnreg=sizes.registers), architectures,
        unaligned=("scores", "row_at", "row_start", "row_end", "arrived", "enabled", "out", "nan"),
    )  # fmt: skip


BUILDS = [
    _select(sizes, group)
    for group in (
        tuple(arch for arch in ARCHITECTURES if arch < 90 and arch not in plan.NAN_APART),
        plan.NAN_APART,
        tuple(arch for arch in ARCHITECTURES if arch >= 90),
    )
    for sizes in plan.CONFIGURATIONS
] + [_select(plan.SHORT, (arch,), settled=True) for arch in ARCHITECTURES]
BUILDS += [
    _select(sizes, (arch,), tells=True)
    for arch in ARCHITECTURES
    if arch < plan.SHORT_OF_REGISTERS
    for sizes in plan.CONFIGURATIONS
]
_OF_NAN = (
    "scores", "row_at", "row_start", "row_end", "enabled", "nan", "given", "width", "rows",
    "scores_stride", "mark",
)  # fmt: skip
BUILDS.append(
    Build(
        "topk: NaN apart",
        "indexer_service.kernels.topk.nan_kernel:tell_nan_kernel",
        {name: kind for name, kind in (_POINTERS | _NUMBERS | _STRIDES).items() if name in _OF_NAN},
        dict(BLOCK=1024),
        {},
        plan.NAN_APART,
        unaligned=_OF_NAN[:6],
    )
)
