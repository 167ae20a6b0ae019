"""What the plugin does not do, said when the engine starts."""

from typing import Any

from torch import device as Device

from attention_worker.plugin.layers import Model, layer_number, model_of
from attention_worker.vllm_compat import index_k_in_fp4
from indexer_service.kernels.limits import HEAD_DIM, HEADS, MAX_TOP_K
from ipc_handoff.allocators import allocator_to_change

_INDEXER = ".indexer."
"""What names of indexers contain."""


def check_engine(vllm_config: Any) -> None:
    """Raise ValueError, naming the option, if the engine is to run in a way that is not served.

    Args:
        vllm_config: vLLM's `VllmConfig`.
    """
    parallel = vllm_config.parallel_config
    for option, unserved, why in (
        (
            "decode_context_parallel_size",
            parallel.decode_context_parallel_size > 1,
            "each rank would select among its own part of the tokens (fix: 1)",
        ),
        (
            "prefill_context_parallel_size",
            parallel.prefill_context_parallel_size > 1,
            "a request's rows would be spread over ranks (fix: 1)",
        ),
        (
            "enable_dbo",
            parallel.use_ubatching,
            "parts of a batch would share one step (fix: without --enable-dbo and --ubatch-size)",
        ),
    ):
        if unserved:
            raise ValueError(f"{option}: not served by dsa-indexer: {why}")
    if index_k_in_fp4(vllm_config):
        raise ValueError(
            "indexer_kv_dtype: 4-bit indexer keys are not served by dsa-indexer (fix: fp8)"
        )
    _check_model(vllm_config.model_config.hf_text_config)


def _check_model(config: Any) -> None:
    for name, served, which in (
        ("index_n_heads", config.index_n_heads in HEADS, f"one of {HEADS}"),
        ("index_head_dim", config.index_head_dim == HEAD_DIM, f"{HEAD_DIM}"),
        ("index_topk", 1 <= config.index_topk <= MAX_TOP_K, f"1 to {MAX_TOP_K}"),
    ):
        if not served:
            raise ValueError(
                f"{name}: {getattr(config, name)} is not served by dsa-indexer (fix: a model with "
                f"{which})"
            )


def check_shared_layers(vllm_config: Any) -> None:
    """Raise ValueError if this worker's layers begin with one that shares another's indices.

    Indices do not travel between the stages of a pipeline: such a layer would read what is in
    memory. To be called when the worker's layers are there.
    """
    target_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    attention, indexers = set(), set()
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if _INDEXER in name:
            indexers.add(layer_number(name))
        elif getattr(layer, "use_sparse", False):  # others take no indices
            attention.add(layer_number(name))
    stage = [layer for layer in attention if model_of(layer, target_layers) is Model.TARGET]
    if not stage or min(stage) in indexers:
        return
    raise ValueError(
        f"pipeline_parallel_size: a stage begins with layer {min(stage)}, which has no indexer and "
        "shares the indices of a layer before, and those stay in the stage before (fix: "
        "VLLM_PP_LAYER_PARTITION with stages that begin with layers that select)"
    )


def why_no_service(vllm_config: Any, device: Device) -> str | None:
    """Why a service could not open this worker's K caches, with the fix; None: it could.

    vLLM makes them later: by then graphs and memory would have been planned for a service.
    """
    if device.type == "cpu":
        return None
    if vllm_config.model_config.enable_sleep_mode:
        return (
            "enable_sleep_mode: a K cache in such memory has no CUDA IPC handle (fix: without "
            "--enable-sleep-mode, or DSA_INDEXER_PLACEMENT=inline)"
        )
    change = allocator_to_change()
    if change is not None:
        variable, value = change
        return (
            f"{variable}: torch's memory would have no CUDA IPC handle (fix: {variable}={value}, "
            "or DSA_INDEXER_PLACEMENT=inline)"
        )
    return None
