"""vLLM's versions: which ones the plugin knows, and where they differ. No other module knows that.

What differs is found out by looking where that is possible: a version only says whether anybody
has looked.
"""

import logging
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import wraps
from typing import Any

BACKEND = "TRITON_MLA_SPARSE"
BACKEND_PATH = "attention_worker.plugin.backend.TritonMLASparseBackend"
_INDEXER = "SparseAttnIndexer"

ALLOW_UNTESTED = "DSA_INDEXER_ALLOW_UNTESTED"
"""Environment variable: with 1 in it, versions that were only read are served too."""

_FIRST_NATIVE_FP8 = 89

_FP8 = ("fp8", "fp8_e4m3")
"""What users call a cache whose values are e4m3."""


class Evidence(StrEnum):
    """What is known about a version of vLLM."""

    GPU = "run on a GPU"
    CPU = "run on a CPU"
    READ = "only read"


VERSIONS: Mapping[str, Evidence] = {
    "0.26": Evidence.READ,
    "0.27": Evidence.READ,
    "0.28": Evidence.READ,
    "0.29": Evidence.READ,
    "0.30": Evidence.READ,
    "0.31": Evidence.READ,
    "0.32": Evidence.CPU,
    "0.33": Evidence.READ,
}


def why_not(version: str, *, allow_untested: bool) -> str | None:
    """Why the plugin does not serve a version of vLLM, in one line; None: it does."""
    found = re.match(r"\d+\.\d+", version)
    evidence = VERSIONS.get(found.group()) if found else None
    if evidence is None:
        first, *_, last = VERSIONS
        return f"vLLM {version} was found, {first} to {last} are supported"
    if evidence is Evidence.READ and not allow_untested:
        tested = [name for name, known in VERSIONS.items() if known is not Evidence.READ]
        return (
            f"vLLM {version} was found, whose source was {evidence} (fix: {ALLOW_UNTESTED}=1 to "
            f"try it, or vLLM {' or '.join(tested)})"
        )
    return None


def installed_version() -> str:
    import vllm

    version: str = vllm.__version__
    return version


def on_cpu() -> bool:
    return bool(_platform().is_cpu())


def native_path_works() -> bool:
    """Whether vLLM computes sparse attention's indexer itself on this platform."""
    platform = _platform()
    if platform.is_cuda():
        from vllm.utils.deep_gemm import is_deep_gemm_supported

        return bool(is_deep_gemm_supported())
    # ROCm and XPU have ways of their own, which stay as they are.
    return not platform.is_cpu()


def share_log(*packages: str) -> None:
    """Let what packages log appear as vLLM's own log does. Nothing if vLLM configures none."""
    own = logging.getLogger("vllm")
    for package in packages if own.handlers else ():
        logger = logging.getLogger(package)
        logger.handlers = list(own.handlers)
        logger.setLevel(own.level)
        logger.propagate = False


def register_backend() -> None:
    """Make TRITON_MLA_SPARSE known, by its name where names can be added and as CUSTOM."""
    from vllm.v1.attention.backends import registry

    backends = registry.AttentionBackendEnum
    if not backends.CUSTOM.is_overridden():
        registry.register_backend(backends.CUSTOM, BACKEND_PATH)
    if hasattr(backends, "register") and BACKEND not in backends.__members__:
        registry.register_backend(BACKEND, BACKEND_PATH)
        # A spawned process unpickles its configuration before it loads plugins: the member
        # brings along what registers it.
        backends[BACKEND].__reduce_ex__ = lambda protocol: (backend_member, ())


def backend_member() -> Any:
    """TRITON_MLA_SPARSE as vLLM's configuration names it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register_backend()
    name = BACKEND if BACKEND in AttentionBackendEnum.__members__ else "CUSTOM"
    return AttentionBackendEnum[name]


def append_to_automatic_choice() -> None:
    """On CUDA, after every backend that vLLM would choose for itself."""
    if not _platform().is_cuda():
        return
    from vllm.platforms import cuda

    def extend(priorities: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        @wraps(priorities)
        def extended(use_mla: bool, *arguments: Any, **named: Any) -> list[Any]:
            chosen = priorities(use_mla, *arguments, **named)
            return [*chosen, backend_member()] if use_mla else chosen

        return extended

    wrap_once(cuda, "_get_backend_priorities", extend)


def accept_fp8_for_backend() -> None:
    """`--kv-cache-dtype fp8` means fp8_ds_mla, as it does with vLLM's own sparse backends."""
    from vllm.model_executor.layers.attention import mla_attention

    def extend(canonical: Callable[..., str]) -> Callable[..., str]:
        @wraps(canonical)
        def extended(attn_backend: Any, kv_cache_dtype: str) -> str:
            if attn_backend.get_name() == BACKEND and kv_cache_dtype in _FP8:
                return "fp8_ds_mla"
            return canonical(attn_backend, kv_cache_dtype)

        return extended

    wrap_once(mla_attention, "_canonicalize_sparse_mla_kv_cache_dtype", extend)


def register_op(
    name: str,
    function: Callable[..., None],
    fake: Callable[..., None],
    mutates: list[str],
) -> Callable[..., None]:
    """Make a torch operator at which vLLM splits its piecewise graphs; the operator.

    It runs outside of piecewise graphs, and inside of full ones.
    """
    import torch
    from vllm.config import CompilationConfig
    from vllm.utils.torch_utils import direct_register_custom_op

    if not hasattr(torch.ops.vllm, name):
        try:
            from vllm.compilation.breakable_cudagraph import eager_break_during_capture
        except ImportError:
            # A version without graphs that are broken while they are captured.
            pass
        else:
            function = eager_break_during_capture(function)
        direct_register_custom_op(name, function, mutates_args=mutates, fake_impl=fake)
        CompilationConfig._attention_ops.append(f"vllm::{name}")
    operator: Callable[..., None] = getattr(torch.ops.vllm, name)
    return operator


def replace_indexer(indexer: type, builder: type) -> None:
    """Put a subclass in place of vLLM's indexer operator, and its builder beside it."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    if op_registry_oot.get(_INDEXER) is indexer:
        return
    CustomOp.register_oot(name=_INDEXER)(indexer)
    original = DeepseekV32IndexerBackend.get_builder_cls

    def get_builder_cls(backend: type) -> type:
        # Backends of other models are subclasses of this one.
        own: type = original() if backend is not DeepseekV32IndexerBackend else builder
        return own

    DeepseekV32IndexerBackend.get_builder_cls = classmethod(get_builder_cls)


def is_v32_indexer(k_cache: Any) -> bool:
    """Whether an indexer's cache is DeepSeek-V3.2's, and not that of a later model."""
    return bool(k_cache.get_attn_backend().get_name() == "DEEPSEEK_V32_INDEXER")


def use_generic_models() -> None:
    """Of models that exist twice, take the one whose indexer can be replaced.

    Newer versions have a fused DeepSeek-V3.2 for CUDA, which calls vLLM's indexer by itself and
    needs fp8 instructions.
    """
    from vllm.model_executor.models import ModelRegistry

    generic = "vllm.model_executor.models"
    for name, path in (
        ("DeepseekV32ForCausalLM", f"{generic}.deepseek_v2:DeepseekV3ForCausalLM"),
        ("GlmMoeDsaForCausalLM", f"{generic}.deepseek_v2:GlmMoeDsaForCausalLM"),
        ("DeepseekV32MTPModel", f"{generic}.deepseek_mtp:DeepSeekMTP"),
    ):
        registered = ModelRegistry.models.get(name)
        if getattr(registered, "module_name", "").startswith("vllm.models.deepseek_v32"):
            ModelRegistry.register_model(name, path)


def adapt_query_kernels(quantise: Callable[..., Any]) -> None:
    """Let index queries be quantised where vLLM's kernels for it do not run.

    To be called while a model's first indexer is made, before which vLLM need not import it.

    Args:
        quantise: takes the place of vLLM's `per_token_group_quant_fp8` on a CPU.
    """
    from vllm.model_executor.models import deepseek_v2

    platform = _platform()
    if platform.is_cpu():
        deepseek_v2.per_token_group_quant_fp8 = quantise
    elif platform.is_cuda() and not platform.has_device_capability(_FIRST_NATIVE_FP8):
        # The fused kernel has fp8 instructions. Each indexer sets this attribute.
        deepseek_v2.Indexer.use_fused_indexer_q = property(lambda _: False, lambda _, value: None)


def index_k_in_fp4(vllm_config: Any) -> bool:
    """Whether the indexer's K cache was asked for in a 4-bit format."""
    attention = vllm_config.attention_config
    dtype = getattr(attention, "indexer_kv_dtype", "auto")
    return bool(getattr(attention, "use_fp4_indexer_cache", False)) or dtype in ("mxfp4", "nvfp4")


def lengths_on_cpu(common: Any) -> Any | None:
    """int32 [R]: the lengths of a batch as the CPU knows them, at least the real ones.

    They are the real ones unless drafts are verified asynchronously.
    """
    return getattr(common, "seq_lens_cpu_upper_bound", None)


def runner_with_pinned_inputs(vllm_config: Any) -> type | None:
    """The class of the engine's model runner, if it keeps pinned inputs over steps.

    So does the first one, and 0.26 to 0.33 wait for their copies under async scheduling only. The
    second one has as many buffers as steps can overlap; DSA models have it from 0.29 on.
    """
    if vllm_config.use_v2_model_runner:
        return None
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: type = GPUModelRunner
    return runner


def layer_name_codec() -> tuple[Callable[[str], Any], Callable[[Any], str]]:
    """How a layer's name becomes an operator's argument, and a name again."""
    from vllm.utils import torch_utils

    return torch_utils._encode_layer_name, torch_utils._resolve_layer_name


def layer_name_type() -> type:
    """Of the argument that the codec makes."""
    from vllm.utils.torch_utils import LayerNameType

    kind: type = LayerNameType
    return kind


def _platform() -> Any:
    from vllm.platforms import current_platform

    return current_platform


_wrapped: set[tuple[int, str]] = set()


def wrap_once(owner: Any, name: str, extend: Callable[[Any], Any]) -> None:
    """Replace a function of vLLM's by what `extend` makes of it, once in a process."""
    if (id(owner), name) not in _wrapped:
        _wrapped.add((id(owner), name))
        setattr(owner, name, extend(getattr(owner, name)))
