"""vLLM's configurations and batches, made up, as far as the plugin looks at them."""

from types import SimpleNamespace
from typing import Any

import torch

TARGET_LAYERS = 2
NAMES = [f"model.layers.{layer}.self_attn.indexer.k_cache" for layer in (0, 1, 2)]
"""The last one is a draft's."""


def config(
    drafts: int = 0,
    *,
    model: dict[str, Any] | None = None,
    attention: dict[str, Any] | None = None,
    **parallel: Any,
) -> SimpleNamespace:
    """Of an engine.

    Args:
        model: what differs in the model's own configuration.
        attention: what there is in the one of attention.
        parallel: what differs in the one of parallelism.
    """
    text = {
        "num_hidden_layers": TARGET_LAYERS,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 64,
    }
    alone = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "use_ubatching": False,
    }
    caches = {
        name: SimpleNamespace(kv_cache=torch.zeros(4, 64, 132, dtype=torch.uint8)) for name in NAMES
    }
    speculative = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**{**text, **(model or {})}),
            max_model_len=256,
            model="tiny",
            enable_sleep_mode=False,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32, max_num_seqs=8),
        parallel_config=SimpleNamespace(**{**alone, **parallel}),
        attention_config=SimpleNamespace(**(attention or {})),
        compilation_config=SimpleNamespace(static_forward_context=caches),
        speculative_config=speculative if drafts else None,
        use_v2_model_runner=False,
    )


def batch(rows: list[int], *, padded_to: int = 0) -> SimpleNamespace:
    """Requests with so many rows; `padded_to` rows, as for a graph."""
    starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    return SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([100 if count else 0 for count in rows], dtype=torch.int32),
        block_table_tensor=torch.zeros(len(rows), 4, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(rows), dtype=torch.int64),
        num_reqs=len(rows),
        num_actual_tokens=padded_to or sum(rows),
        max_query_len=max(rows),
        max_seq_len=100,
    )
