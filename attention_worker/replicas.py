"""Replicas of the indexer's K caches on the service's GPU.

Reading the caches over the link would take many times as long as scoring them does; writing each
token there as well costs 132 bytes a token and layer.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ipc_handoff.banks import k_cache_region
from ipc_handoff.cuda_regions import CudaMemory
from ipc_handoff.regions import SharedTensor, TensorSpec


def allocate_replicas(k_caches: Mapping[int, Tensor], device: int) -> dict[int, SharedTensor]:
    """One replica a layer, of zeros, uint8 [pages, page, D+4] without gaps.

    Args:
        k_caches: by layer, of those shapes.
        device: ordinal of the service's GPU.

    Raises:
        RegionError: no memory there; names the region.
    """
    replicas = {}
    for layer, k_cache in k_caches.items():
        label = k_cache_region(layer)
        spec = TensorSpec(tuple(k_cache.shape), torch.uint8)
        memory = CudaMemory.allocate(spec.byte_size, device, label)
        tensor = memory.tensor(0, spec.byte_size, spec, label)
        replicas[layer] = SharedTensor(memory, 0, spec, tensor)
    return replicas
