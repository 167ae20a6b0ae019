"""Other kernels for the indexer's work, called as vLLM calls them, for those that are importable.

A peer that is missing raises ImportError (or AttributeError, in a vLLM that lacks the operation)
when it is made; one that does not support a shape raises when it is called.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from indexer_inputs import DEVICE, PAGE, Decode, Prefill
from torch import Tensor

TOPK_WORKSPACE = 1 << 20
"""Bytes that vLLM gives its top-k kernels."""

COOPERATIVE_ROWS = 32
"""More rows the cooperative kernel refuses."""

Logits = Callable[[int], Tensor]
TopK = Callable[[Tensor], Tensor]
"""fp32 scores [rows, width] -> int32 [rows, k], in no order."""


@cache
def deep_gemm() -> ModuleType:
    """The package, or vLLM's copy of it, with dependent launches on, as vLLM sets them."""
    try:
        module = import_module("deep_gemm")
    except ImportError:
        module = import_module("vllm.third_party.deep_gemm")
    if hasattr(module, "set_pdl"):
        module.set_pdl(True)
    return module


@cache
def _vllm_operations() -> Any:
    import_module("vllm._custom_ops")
    return torch.ops._C


def paged_metadata(inputs: Decode) -> Callable[[], Tensor]:
    """DeepGEMM's schedule, which vLLM makes once a step for all layers."""
    module, lengths = deep_gemm(), inputs.row_lengths
    return lambda: module.get_paged_mqa_logits_metadata(lengths, PAGE, module.get_num_sms())


def paged_logits(inputs: Decode) -> Logits:
    """DeepGEMM's paged logits; what lies past a row's length is left unwritten."""
    module, schedule = deep_gemm(), paged_metadata(inputs)()
    q = inputs.q.view(torch.float8_e4m3fn)
    k_cache, lengths = inputs.k_cache.unsqueeze(2), inputs.row_lengths
    return lambda call: module.fp8_paged_mqa_logits(
        q, k_cache, inputs.weights, lengths, inputs.tables[call], schedule, inputs.max_context,
        False,
    )  # fmt: skip


def ragged_logits(inputs: Prefill) -> Logits:
    module = deep_gemm()
    q, k = inputs.q.view(torch.float8_e4m3fn), inputs.k.view(torch.float8_e4m3fn)
    return lambda _: module.fp8_mqa_logits(
        q, (k, inputs.k_scale), inputs.weights, inputs.row_start, inputs.row_end, False
    )


def _decode_output(rows: int, k: int) -> tuple[Tensor, Tensor]:
    indices = torch.empty((rows, k), dtype=torch.int32, device=DEVICE)
    return indices, torch.empty(TOPK_WORKSPACE, dtype=torch.uint8, device=DEVICE)


def cooperative(lengths: Tensor, k: int, longest: int) -> TopK:
    operation = _vllm_operations().cooperative_topk
    if lengths.numel() > COOPERATIVE_ROWS:
        raise ImportError(f"takes at most {COOPERATIVE_ROWS} rows")
    indices, workspace = _decode_output(lengths.numel(), k)

    def select(scores: Tensor) -> Tensor:
        operation(scores, lengths, indices, workspace, k, longest)
        return indices

    return select


def persistent(lengths: Tensor, k: int, longest: int) -> TopK:
    operation = _vllm_operations().persistent_topk
    indices, workspace = _decode_output(lengths.numel(), k)

    def select(scores: Tensor) -> Tensor:
        operation(scores, lengths, indices, workspace, k, scores.shape[1])
        return indices

    return select


def per_row_decode(lengths: Tensor, k: int, longest: int) -> TopK:
    operation = _vllm_operations().top_k_per_row_decode
    indices, _ = _decode_output(lengths.numel(), k)

    def select(scores: Tensor) -> Tensor:
        rows, strides = len(scores), scores.stride()
        operation(scores, lengths.shape[1], lengths, indices, rows, *strides, k)
        return indices

    return select


def per_row_prefill(start: Tensor, end: Tensor, k: int) -> TopK:
    operation = _vllm_operations().top_k_per_row_prefill
    indices, _ = _decode_output(len(start), k)

    def select(scores: Tensor) -> Tensor:
        operation(scores, start, end, indices, len(scores), *scores.stride(), k)
        return indices

    return select


def torch_topk(lengths: Tensor, k: int, longest: int) -> TopK:
    """Over all `longest` columns: it takes no lengths, so they must all be that long."""
    return lambda scores: torch.topk(scores[:, :longest], k, sorted=False).indices


DECODE_TOPK: dict[str, Callable[[Tensor, int, int], TopK]] = {
    "cooperative": cooperative,
    "persistent": persistent,
    "per row": per_row_decode,
}
"""vLLM's. Each takes the rows' lengths [B, next_n], k and the longest length."""


def insert(k: Tensor, slots: Tensor, k_cache: Tensor) -> Callable[[int], None]:
    """`slots` [calls, T]: the i-th call writes slots[i]."""
    _vllm_operations()
    operation = torch.ops._C_cache_ops.indexer_k_quant_and_cache
    return lambda call: operation(k, k_cache, slots[call], k.shape[1], "ue8m0")


def gather(k_cache: Tensor, tables: Tensor, lengths: Tensor) -> Callable[[int], None]:
    """`tables` [calls, R, n]; the sizes are read here, before the clock starts."""
    _vllm_operations()
    operation = torch.ops._C_cache_ops.cp_gather_indexer_k_quant_cache
    total, dim = int(lengths.sum()), k_cache.shape[2] - 4
    values = torch.empty((total, dim), dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.empty((total, 4), dtype=torch.uint8, device=DEVICE)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    starts[1:] = lengths.cumsum(0)
    return lambda call: operation(k_cache, values, scales, tables[call], starts)
