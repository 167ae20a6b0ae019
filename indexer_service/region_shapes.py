"""What a region must look like for its session, before its memory is opened."""

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.errors import invalid
from ipc_handoff.banks import ANSWERS, CONTROL, K_CACHE_PREFIX, STAGING
from ipc_handoff.device_layout import DEVICE_LINE
from ipc_handoff.flag_words import FLAGS, FlagLayout
from ipc_handoff.layout import CACHE_LINE, HandoffGeometry
from ipc_handoff.regions import TensorSpec

# Scales of the K cache are float32 behind the bytes of a page.
_K_CACHE_ALIGNMENT = 4
_SCALE_BYTES = 4


def check_shape(region: pb.Region, spec: TensorSpec, geometry: HandoffGeometry) -> None:
    """Dtype, shape, strides and offset, against the layout of the kind of memory it lies in.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if spec.dtype != torch.uint8:
        raise invalid(
            f"{region.name}.data_type", pb.DataType.Name(region.data_type), "DATA_TYPE_UINT8"
        )
    in_device_memory = region.HasField("cuda_ipc")
    if region.name.startswith(K_CACHE_PREFIX):
        alignment = _K_CACHE_ALIGNMENT
        _check_k_cache(region.name, spec, geometry)
    else:
        alignment = DEVICE_LINE if in_device_memory else CACHE_LINE
        _check_bank(region.name, spec, _bank_bytes(region.name, geometry, in_device_memory))
    kind = "cuda_ipc" if in_device_memory else "host"
    offset = getattr(region, kind).offset
    if offset % alignment:
        raise invalid(
            f"{region.name}.{kind}.offset",
            f"{offset} is not a multiple of {alignment}",
            "align the region",
        )


def _bank_bytes(name: str, geometry: HandoffGeometry, in_device_memory: bool) -> int:
    if name == CONTROL:
        return geometry.control.size
    if name == FLAGS:
        return FlagLayout(len(geometry.layers)).size
    if in_device_memory:
        device = geometry.device
        return {STAGING: device.staging_size, ANSWERS: device.answers_size}[name]
    return {STAGING: geometry.staging.size, ANSWERS: geometry.answers.size}[name]


def _check_bank(name: str, spec: TensorSpec, needed: int) -> None:
    if len(spec.shape) != 1 or spec.element_strides != (1,):
        raise invalid(
            f"{name}.shape",
            f"{list(spec.shape[:8])} with strides {list(spec.element_strides[:8])}",
            "one dimension of contiguous bytes",
        )
    if spec.shape[0] < needed:
        raise invalid(
            f"{name}.shape",
            f"{spec.shape[0]} bytes, the layout needs {needed}",
            "the layout's size for this geometry",
        )


def _check_k_cache(name: str, spec: TensorSpec, geometry: HandoffGeometry) -> None:
    page, width = geometry.page_size, geometry.head_dim + _SCALE_BYTES
    if len(spec.shape) != 3 or spec.shape[1:] != (page, width):
        raise invalid(f"{name}.shape", f"{list(spec.shape[:8])}", f"[pages, {page}, {width}]")
    between_pages, between_tokens, between_bytes = spec.element_strides
    if (between_tokens, between_bytes) != (width, 1):
        raise invalid(
            f"{name}.strides",
            f"{list(spec.element_strides)} is not dense inside a page",
            f"[any, {width}, 1]",
        )
    if between_pages < page * width or between_pages % _K_CACHE_ALIGNMENT:
        raise invalid(
            f"{name}.strides",
            f"{between_pages} bytes between pages",
            f"at least {page * width}, a multiple of {_K_CACHE_ALIGNMENT}",
        )
