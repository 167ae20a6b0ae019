"""The `config.json` of a DeepSeek-V3.2 that is small, and dense in every layer."""

from typing import Any


def config(
    *,
    hidden: int,
    layers: int,
    heads: int,
    vocabulary: int,
    longest: int,
    q_lora: int,
    index_heads: int,
    top_k: int,
) -> dict[str, Any]:
    """What is no argument is as published, but for the experts, which no layer has.

    Args:
        hidden: width of hidden states, and of the dense MLPs.
        longest: positions.
        q_lora: width of the compressed queries.
    """
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "moe_intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-6,
        "q_lora_rank": q_lora,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": layers,
        "moe_layer_freq": 1,
        "index_n_heads": index_heads,
        "index_head_dim": 128,
        "index_topk": top_k,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        "ep_size": 1,
    }
