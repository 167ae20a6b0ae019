"""Loads the step recorded inside vLLM 0.26.0 (H200, FlashMLA, DeepGEMM) for tests.

A 3-layer random DeepSeek-V3.2: 64 index heads of 128, k = 2048, 16 attention heads, pages of 64.
Second layer, third decode step of two requests of 693 and 2503 tokens, 19 rows of their prefill,
and 256 inserted keys. Nothing in it was computed by this project. Do not write into its tensors.
"""

import lzma
from dataclasses import dataclass
from functools import cache

from safetensors.torch import load as load_bytes
from torch import Tensor

from . import path

TOP_K = 2048


@dataclass(frozen=True)
class Decode:
    """Two decode rows, and DeepGEMM's scores of them."""

    q: Tensor  # uint8 (e4m3) [2, 1, 64, 128]
    weights: Tensor  # fp32 [2, 64], scales folded in
    seq_lens: Tensor  # int32 [2, 1]
    block_table: Tensor  # int32 [2, 40]
    k_cache: Tensor  # uint8 [51, 64, 132], planar pages
    logits: Tensor  # fp32 [2, 2503], -inf past the length


@dataclass(frozen=True)
class Prefill:
    """19 prefill rows over gathered keys, and DeepGEMM's scores of them."""

    q: Tensor  # uint8 (e4m3) [19, 64, 128]
    weights: Tensor  # fp32 [19, 64]
    row_start: Tensor  # int32 [19]
    row_end: Tensor  # int32 [19]
    k: Tensor  # uint8 (e4m3) [3190, 128]
    k_scale: Tensor  # fp32 [3190]
    logits: Tensor  # fp32 [19, 3190], -inf outside the bounds


@dataclass(frozen=True)
class Attention:
    """The selection that vLLM made for the decode rows, and FlashMLA's attention over it."""

    topk_indices: Tensor  # int32 [2, 2048], any order, -1 padded
    q: Tensor  # bf16 [2, 16, 576]
    kv_cache: Tensor  # bf16 [51, 64, 576]
    block_table: Tensor  # int32 [2, 40]
    scale: float
    out: Tensor  # bf16 [2, 16, 512]


@dataclass(frozen=True)
class Insert:
    """Keys, and the bytes and scale that vLLM wrote into the indexer's cache for each."""

    k: Tensor  # bf16 [256, 128]
    slots: Tensor  # int64 [256]
    values: Tensor  # uint8 (e4m3) [256, 128]
    scales: Tensor  # fp32 [256, 1]


@dataclass(frozen=True)
class Recording:
    decode: Decode
    prefill: Prefill
    attention: Attention
    insert: Insert


@cache
def load() -> Recording:
    """The recording; read once a process."""
    t = load_bytes(lzma.decompress(path().read_bytes()))
    return Recording(
        decode=Decode(
            q=t["decode.q_fp8"],
            weights=t["decode.weights"],
            seq_lens=t["decode.seq_lens"],
            block_table=t["decode.block_table"],
            k_cache=t["decode.k_cache"],
            logits=t["decode.logits"],
        ),
        prefill=Prefill(
            q=t["prefill.q_fp8"],
            weights=t["prefill.weights"],
            row_start=t["prefill.ks"],
            row_end=t["prefill.ke"],
            k=t["prefill.k_fp8"],
            k_scale=t["prefill.k_scale"],
            logits=t["prefill.logits"],
        ),
        attention=Attention(
            topk_indices=t["attn.topk_indices"],
            q=t["attn.q"],
            kv_cache=t["attn.kv_cache"],
            block_table=t["attn.block_table"],
            scale=float(t["attn.scale"]),
            out=t["attn.out"],
        ),
        insert=Insert(
            k=t["insert.k"],
            slots=t["insert.slots"],
            values=t["insert.values"],
            scales=t["insert.scales"],
        ),
    )
