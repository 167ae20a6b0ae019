"""The engines of the vLLM comparison, by name."""

from dataclasses import dataclass, field
from typing import Any

INLINE = {"DSA_INDEXER_PLACEMENT": "inline"}
MPS = {"DSA_INDEXER_PLACEMENT": "mps"}
SM80 = {"DSA_INDEXER_FORCE_ARCH": "80"}
WITHOUT_PLUGIN = {"VLLM_PLUGINS": ""}
OURS = "CUSTOM"


@dataclass(frozen=True)
class Case:
    """Attributes:
    backend: of attention.
    variables: of the plugin and vLLM.
    options: of `vllm.LLM`.
    service: variables of the service that it has; None: none.
    under_mps: whether the engine is a client of the MPS daemon.
    same_as: the case whose answers must have the same bits.
    """

    backend: str | None
    variables: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    service: dict[str, str] | None = None
    under_mps: bool = True
    same_as: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether attention and selection are this project's: then answers repeat."""
        return self.backend in (OURS, None)

    @property
    def gpus(self) -> int:
        ranks = ("tensor_parallel_size", "pipeline_parallel_size")
        return max(self.options.get(each, 1) for each in ranks)


EAGER = {"enforce_eager": True}
TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2, "async_scheduling": False}
"""Steps overlap, and nothing but the plugin's guard keeps their inputs apart."""

ONE_GPU = {
    "FLASHMLA_SPARSE": Case("FLASHMLA_SPARSE"),
    "FLASH_ATTN_MLA_SPARSE": Case("FLASH_ATTN_MLA_SPARSE"),
    "inline": Case(OURS, INLINE),
    "remote": Case(OURS, MPS, service={}, same_as="inline"),
    "inline, no MPS": Case(OURS, INLINE, under_mps=False, same_as="inline"),
    "inline, eager": Case(OURS, INLINE, EAGER),
    "remote, eager": Case(OURS, MPS, EAGER, service={}, same_as="inline, eager"),
    "inline, SM80": Case(OURS, {**INLINE, **SM80}),
    "remote, SM80": Case(OURS, {**MPS, **SM80}, service=SM80, same_as="inline, SM80"),
    "remote, FLASHMLA_SPARSE": Case("FLASHMLA_SPARSE", MPS, service={}),
}
TIMED = ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", "inline", "remote", "inline, no MPS")
_PROFILED = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.3}
"""vLLM plans its KV cache by what is left: the pages show what was reserved."""

STARTED = {
    "without the plugin": Case("FLASHMLA_SPARSE", WITHOUT_PLUGIN, _PROFILED, under_mps=False),
    "plugin, no variable": Case("FLASHMLA_SPARSE", options=_PROFILED, under_mps=False),
    "inline, first": Case(OURS, INLINE, _PROFILED, under_mps=False),
    "inline, again": Case(OURS, INLINE, _PROFILED, under_mps=False),
    "remote": Case(OURS, MPS, _PROFILED, service={}),
}
TWO_GPUS = {
    "TP=2, FLASHMLA_SPARSE": Case("FLASHMLA_SPARSE", options=TENSOR),
    "TP=2, inline": Case(OURS, INLINE, TENSOR),
    "TP=2, remote": Case(OURS, MPS, TENSOR, service={}, same_as="TP=2, inline"),
    "PP=2, inline": Case(OURS, INLINE, PIPELINE),
    "PP=2, remote": Case(OURS, MPS, PIPELINE, service={}, same_as="PP=2, inline"),
}
_PATIENT = {"DSA_INDEXER_WAIT_BOUND_SECONDS": "20", "DSA_INDEXER_GATE_BOUND_SECONDS": "20"}
REHEARSED = {
    "inline": Case(None, INLINE, EAGER),
    "remote": Case(None, _PATIENT, EAGER, service=_PATIENT, same_as="inline"),
}
"""On a CPU."""
