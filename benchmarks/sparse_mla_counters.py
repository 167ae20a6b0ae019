"""What bounds sparse MLA: Nsight Compute's counters (`counters.py`).

python benchmarks/sparse_mla_counters.py        on a CUDA machine that has ncu
"""

from collections.abc import Callable
from functools import partial

import torch
from counters import Workloads, main
from sparse_mla import CONTEXT, SCALE, K, bf16_cache, fp8_cache

from attention_worker.kernels import sparse_mla

MAKE = {"bf16": bf16_cache, "fp8_ds_mla": fp8_cache}


def _attend(form: str, heads: int, tokens: int, invariant: bool) -> Callable[[], object]:
    context = CONTEXT["decode" if tokens < 512 else "prefill"]
    cache = MAKE[form](context)
    q = torch.randn((tokens, heads, 576), device="cuda", dtype=torch.bfloat16)
    slots = torch.randint(0, context, (tokens, K), device="cuda", dtype=torch.int32)
    return lambda: sparse_mla.attend(q, cache, slots, SCALE, batch_invariant=invariant)


SHAPES = [
    ("bf16", 16, 64, False), ("bf16", 64, 64, False), ("bf16", 64, 512, False),
    ("bf16", 64, 512, True), ("fp8_ds_mla", 16, 64, False), ("fp8_ds_mla", 16, 512, True),
    ("fp8_ds_mla", 64, 64, False),
]  # fmt: skip
"""Cache, heads, tokens, whether batch-invariant."""

WORKLOADS: Workloads = {
    f"{form} {heads}x{tokens}{' invariant' if invariant else ''}": partial(
        _attend, form, heads, tokens, invariant
    )
    for form, heads, tokens, invariant in SHAPES
}

if __name__ == "__main__":
    main(__file__, "sparse_mla_counters", WORKLOADS)
