"""What `sparse_mla.py --variants` times: choices that were not measured when they were made.

A variant is a call's own choice, a constant of the plan, or a text of a kernel's source; none of
it is in the product but what the list says is there.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from changed_source import Source, changed

from attention_worker.kernels.sparse_mla import plan

_HERE = "attention_worker.kernels.sparse_mla"


@dataclass(frozen=True)
class Variant:
    """One way to compute."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Of `sparse_mla.attend`."""
    plan: dict[str, Any] = field(default_factory=dict)
    """Constants of the plan."""
    source: Source | None = None
    context: int | None = None
    """Cached tokens that slots are drawn from (None: as for the other tables)."""


@dataclass(frozen=True)
class Question:
    """What a table of times decides."""

    cache: str
    shapes: tuple[tuple[int, int], ...]
    """Heads and tokens."""
    variants: dict[str, Variant]


_INVARIANT = {"batch_invariant": True}
_IN_L2 = 8192
"""So few tokens that the L2 cache has all of them."""

_WHOLE_LINES = Source(
    f"{_HERE}.hopper_fp8", "[1, elements], [8, 4], [warps, 1]", "[1, elements], [4, 8], [warps, 1]"
)
_ALL_AHEAD = Source(
    f"{_HERE}.hopper_fp8_products", "AHEAD: gl.constexpr = 2 // groups(WARPS)",
    "AHEAD: gl.constexpr = 4 // groups(WARPS)", users=(f"{_HERE}.hopper_fp8",),
)  # fmt: skip

QUESTIONS = {
    "batch-invariant, more than 32 heads: up to how many tokens the form `spread`": Question(
        "bf16", ((64, 1), (64, 2), (64, 4), (64, 8), (64, 12), (64, 16), (64, 32), (128, 4)),
        {
            "the automatic choice": Variant(),
            "wide": Variant(_INVARIANT, {"SPREAD_TILES": 0}),
            "spread": Variant(_INVARIANT, {"SPREAD_TILES": 1 << 20}),
            "spread, 128 columns": Variant(
                _INVARIANT, {"SPREAD_TILES": 1 << 20, "SPREAD_COLUMNS": 128}
            ),
        },
    ),
    "batch-invariant, 17 to 32 heads: eight splits or sixteen": Question(
        "bf16", ((32, 1), (32, 8), (32, 64), (32, 512)),
        {
            "the automatic choice": Variant(),
            "8 splits": Variant(_INVARIANT),
            "16 splits": Variant(_INVARIANT, {"_INVARIANT_SPLITS": {16: 16, 32: 16, 64: 4}}),
        },
    ),
    "fp8, 16 heads: does a gathered token cost requests of half a line, or the block's chain": (
        Question(
            "fp8_ds_mla", ((16, 64),),
            {
                "as it is": Variant(),
                "tokens in the L2 cache": Variant(context=_IN_L2),
                "requests of whole lines": Variant(source=_WHOLE_LINES),
                "all groups' scores queued at once": Variant(source=_ALL_AHEAD),
                **{f"{splits} splits": Variant({"num_kv_splits": splits}) for splits in (2, 3, 8)},
            },
        )
    ),
    "the same in bf16, to compare": Question(
        "bf16", ((16, 64),),
        {"as it is": Variant(), "tokens in the L2 cache": Variant(context=_IN_L2)},
    ),
}  # fmt: skip


@contextmanager
def prepared(variant: Variant) -> Iterator[None]:
    """Calls within are computed so."""
    with ExitStack() as stack:
        for name, value in variant.plan.items():
            stack.enter_context(patch.object(plan, name, value))
        if variant.source is not None:
            stack.enter_context(changed(variant.source))
        yield
