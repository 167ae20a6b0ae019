"""What the plugin does not do, said when the engine starts."""

from typing import Any

from attention_worker.vllm_compat import index_k_in_fp4


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
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "a request's rows would be spread over ranks (fix: 1)",
        ),
        (
            "enable_dbo",
            getattr(parallel, "enable_dbo", False),
            "two halves of a batch would share one step (fix: without --enable-dbo)",
        ),
    ):
        if unserved:
            raise ValueError(f"{option}: not served by dsa-indexer: {why}")
    if index_k_in_fp4(vllm_config):
        raise ValueError(
            "indexer_kv_dtype: 4-bit indexer keys are not served by dsa-indexer (fix: fp8)"
        )
