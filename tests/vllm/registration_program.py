"""Registers the plugin on platforms that are made up, and says what changed.

    registration_program.py CASES

CASES: JSON, [[capability of an NVIDIA GPU, version that vLLM is to have, environment], ...].
Prints a line of JSON a case: what models, operators and chosen backends were before and are
afterwards, and what was logged. vLLM is imported once, and each case is a fork.
"""

import json
import logging
import os
import sys
from typing import Any
from unittest.mock import MagicMock


def main() -> None:
    pretended = pretend_cuda()
    import vllm
    import vllm.v1.attention.backends.mla.flashmla_sparse
    from vllm.model_executor.layers import sparse_attn_indexer  # noqa: F401

    for capability, version, environment in json.loads(sys.argv[1]):
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(f"{capability}, {version}, {environment}: status {status}")
            continue
        pretended.major, pretended.minor = map(int, capability.split("."))
        vllm.__version__ = version
        os.environ.update(environment)
        print(json.dumps(register_once_more()), flush=True)
        os._exit(0)


def register_once_more() -> dict[str, Any]:
    from attention_worker.plugin import logger, register

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger.addHandler(handler)
    facts()  # looking imports modules, which register operators of vLLM's
    before = facts()
    register()
    register()  # vLLM may load plugins more than once
    return {"before": before, "after": facts(), "logged": logged}


def pretend_cuda() -> Any:
    """Make this process believe in a GPU, whose native kernels are all installed.

    Returns:
        What has the attributes `major` and `minor` of its capability.
    """
    for extension in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn"):
        sys.modules[extension] = MagicMock()
    from vllm import platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class Pretended(cuda.CudaPlatformBase):
        major, minor = 9, 0

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(cls.major, cls.minor)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "pretended"

    platforms._current_platform = Pretended()
    from vllm.utils import deep_gemm

    deep_gemm.has_deep_gemm = lambda: True
    return Pretended


def facts() -> dict[str, Any]:
    from vllm.config import CompilationConfig
    from vllm.model_executor.custom_op import op_registry, op_registry_oot
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    return {
        "operators": {name: str(found) for name, found in op_registry.items()},
        "replaced operators": {name: str(found) for name, found in op_registry_oot.items()},
        "models": {name: repr(found) for name, found in ModelRegistry.models.items()},
        "split at": list(CompilationConfig._attention_ops),
        "indexer's builder": DeepseekV32IndexerBackend.get_builder_cls().__name__,
        "chosen backend": chosen_backend(),
        "chosen for pages of 16": chosen_backend(block_size=16),
        "chosen for another cache": chosen_backend(kv_cache_dtype="fp8_e5m2"),
        "candidates": candidates(),
    }


def candidates() -> dict[str, list[str]]:
    """Backends that vLLM tries, in order, by what they are for."""
    from vllm.platforms import cuda, current_platform

    capability = current_platform.get_device_capability()
    return {
        kind: [each.name for each in cuda._get_backend_priorities(use_mla, capability, 128)]
        for kind, use_mla in (("latent", True), ("other", False))
    }


def chosen_backend(block_size: int | None = None, kv_cache_dtype: Any = "auto") -> str:
    """Its class, for DeepSeek-V3.2, if nobody says which."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    wanted = AttentionSelectorConfig(
        head_size=576,
        dtype=torch.bfloat16,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        use_mla=True,
        use_sparse=True,
    )
    try:
        path = current_platform.get_attn_backend_cls(None, wanted, 128)
    except (AssertionError, NotImplementedError, ValueError) as error:
        # vLLM has none, or its own needs a real GPU already when it is looked at.
        return f"none: {type(error).__name__}"
    return str(path).rpartition(".")[2]


if __name__ == "__main__":
    main()
