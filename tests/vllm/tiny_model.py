"""A DeepSeek-V3.2 small enough for a CPU, whose answers depend on what its indexer selects.

vLLM's own dummy weights are so small that attention vanishes from the result. These have unit
gain: every layer, and every token that is attended to, moves the logits.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks import deepseek_v32

HIDDEN, LAYERS, HEADS, VOCABULARY = 256, 4, 4, 512
Q_LORA, LATENT, NOPE, ROPE, VALUE = 128, 512, 128, 64, 128
INDEX_HEADS, INDEX_DIM = 16, 128
TOP_K = 64
"""Of prompts that are several times as long."""

INDEXED = (0, 1, 3)
"""Layers with an indexer: with `index_topk_freq` 2, layer 2 uses layer 1's selection."""

CONFIG = {
    **deepseek_v32.config(
        hidden=HIDDEN,
        layers=LAYERS,
        heads=HEADS,
        vocabulary=VOCABULARY,
        longest=2048,
        q_lora=Q_LORA,
        index_heads=INDEX_HEADS,
        top_k=TOP_K,
    ),
    "index_topk_freq": 2,
}


DENSE = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
"""The same model without an indexer."""


DRAFTING = {"num_nextn_predict_layers": 1, "first_k_dense_replace": LAYERS + 1}
"""The same model with a layer that drafts (MTP); it has an indexer of its own."""


def write_model(folder: Path, *, dense: bool = False, drafting: bool = False) -> None:
    """Write configuration and weights as vLLM loads them.

    Args:
        dense: the model before DeepSeek-V3.2, with the same weights: it attends to all tokens.
        drafting: with a layer for MTP.
    """
    folder.mkdir(parents=True)
    config = dict(CONFIG)
    if dense:
        config = {name: value for name, value in CONFIG.items() if not name.startswith("index_")}
        config |= DENSE
    if drafting:
        config |= DRAFTING
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(20)
    weights = {}
    shapes = _shapes()
    if drafting:
        shapes |= _drafting_shapes()
    for name, shape in shapes.items():
        if len(shape) == 1:
            weight = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            gain = 1.0 if "embed" in name else shape[-1] ** -0.5
            weight = torch.randn(shape, generator=generator) * gain
        if not dense or ".indexer." not in name:
            weights[name] = weight.to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        shapes |= _layer_shapes(layer, indexed=layer in INDEXED)
    return shapes


def _drafting_shapes() -> dict[str, tuple[int, ...]]:
    at = f"model.layers.{LAYERS}"
    return {
        **_layer_shapes(LAYERS, indexed=True),
        f"{at}.embed_tokens.weight": (VOCABULARY, HIDDEN),
        f"{at}.enorm.weight": (HIDDEN,),
        f"{at}.hnorm.weight": (HIDDEN,),
        f"{at}.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        f"{at}.shared_head.norm.weight": (HIDDEN,),
        f"{at}.shared_head.head.weight": (VOCABULARY, HIDDEN),
    }


def _layer_shapes(layer: int, *, indexed: bool) -> dict[str, tuple[int, ...]]:
    at = f"model.layers.{layer}"
    attention = f"{at}.self_attn"
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}.input_layernorm.weight": (HIDDEN,),
        f"{at}.post_attention_layernorm.weight": (HIDDEN,),
        f"{at}.mlp.gate_proj.weight": (HIDDEN, HIDDEN),
        f"{at}.mlp.up_proj.weight": (HIDDEN, HIDDEN),
        f"{at}.mlp.down_proj.weight": (HIDDEN, HIDDEN),
        f"{attention}.q_a_proj.weight": (Q_LORA, HIDDEN),
        f"{attention}.q_a_layernorm.weight": (Q_LORA,),
        f"{attention}.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_LORA),
        f"{attention}.kv_a_proj_with_mqa.weight": (LATENT + ROPE, HIDDEN),
        f"{attention}.kv_a_layernorm.weight": (LATENT,),
        f"{attention}.kv_b_proj.weight": (HEADS * (NOPE + VALUE), LATENT),
        f"{attention}.o_proj.weight": (HIDDEN, HEADS * VALUE),
    }
    if indexed:
        shapes |= {
            f"{attention}.indexer.wq_b.weight": (INDEX_HEADS * INDEX_DIM, Q_LORA),
            f"{attention}.indexer.wk.weight": (INDEX_DIM, HIDDEN),
            f"{attention}.indexer.k_norm.weight": (INDEX_DIM,),
            f"{attention}.indexer.k_norm.bias": (INDEX_DIM,),
            f"{attention}.indexer.weights_proj.weight": (INDEX_HEADS, HIDDEN),
        }
    return shapes
