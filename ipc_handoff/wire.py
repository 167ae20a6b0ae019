"""How the data contract's terms are written in the control contract's messages."""

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.cuda_regions import HANDLE_BYTES, CudaExport
from ipc_handoff.errors import RegionError
from ipc_handoff.layout import LAYOUT_VERSION, HandoffGeometry
from ipc_handoff.regions import DTYPES, TensorSpec

_PREFIX = "DATA_TYPE_"
# Before any arithmetic over them: a request may carry hundreds of thousands.
MAX_DIMENSIONS = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def host_region(
    name: str, token: int, spec: TensorSpec, *, offset: int = 0, byte_size: int | None = None
) -> pb.Region:
    """Describe a view of host memory whose descriptor was sent under `token`.

    `byte_size` defaults to what shape and strides reach.
    """
    return pb.Region(
        name=name,
        host=pb.HostMemory(token=token, offset=offset),
        byte_size=spec.byte_size if byte_size is None else byte_size,
        shape=spec.shape,
        strides=spec.strides,
        data_type=_PREFIX + _NAMES[spec.dtype],
    )


def cuda_region(name: str, export: CudaExport, spec: TensorSpec, offset: int = 0) -> pb.Region:
    """Describe a view of exported device memory, `offset` bytes behind the export's first."""
    return pb.Region(
        name=name,
        cuda_ipc=pb.CudaIpcMemory(
            handle=export.handle,
            offset=export.offset + offset,
            gpu_uuid=export.gpu_uuid,
            allocation=export.allocation,
        ),
        byte_size=spec.byte_size,
        shape=spec.shape,
        strides=spec.strides,
        data_type=_PREFIX + _NAMES[spec.dtype],
    )


def cuda_export(region: pb.Region) -> CudaExport:
    """The device memory that a region names.

    Raises:
        RegionError: no handle, no GPU, or a number that makes no sense.
    """
    memory, field = region.cuda_ipc, f"{region.name}.cuda_ipc"
    if len(memory.handle) != HANDLE_BYTES:
        raise RegionError(
            f"{field}.handle: {len(memory.handle)} bytes (fix: the {HANDLE_BYTES} of "
            "cudaIpcGetMemHandle)"
        )
    if not memory.gpu_uuid:
        raise RegionError(f"{field}.gpu_uuid: is empty (fix: the UUID of the memory's GPU)")
    if not memory.allocation:
        raise RegionError(f"{field}.allocation: 0 (fix: number allocations from 1)")
    return CudaExport(
        memory.handle, memory.offset, region.byte_size, memory.gpu_uuid, memory.allocation
    )


def region_spec(region: pb.Region) -> TensorSpec:
    """Shape, strides and dtype of a described region.

    Raises:
        RegionError: a data type that does not exist, more than `MAX_DIMENSIONS`, or numbers that
            make no sense.
    """
    for field in ("shape", "strides"):
        count = len(getattr(region, field))
        if count > MAX_DIMENSIONS:
            raise RegionError(
                f"{region.name}.{field}: {count} dimensions (fix: at most {MAX_DIMENSIONS})"
            )
    try:
        dtype = DTYPES[pb.DataType.Name(region.data_type).removeprefix(_PREFIX)]
    except (ValueError, KeyError):
        raise RegionError(
            f"{region.name}.data_type: {region.data_type} (fix: one of {', '.join(DTYPES)})"
        ) from None
    spec = TensorSpec(tuple(region.shape), dtype, tuple(region.strides))
    spec.check(region.name)
    return spec


def geometry_message(geometry: HandoffGeometry) -> pb.Geometry:
    """The geometry as OpenSession carries it."""
    return pb.Geometry(
        layers=geometry.layers,
        heads=geometry.heads,
        head_dim=geometry.head_dim,
        top_k=geometry.top_k,
        page_size=geometry.page_size,
        k_cache_layout=pb.K_CACHE_LAYOUT_PLANAR_E4M3,
        max_rows=geometry.max_rows,
        max_requests=geometry.max_requests,
        max_context=geometry.max_context,
    )


def layout_message(geometry: HandoffGeometry) -> pb.HandoffLayout:
    """Version and fingerprint of this side's layout."""
    return pb.HandoffLayout(
        version=LAYOUT_VERSION, fingerprint=geometry.fingerprint, slots=geometry.slots
    )


def handoff_geometry(geometry: pb.Geometry, slots: int) -> HandoffGeometry:
    """The layout's geometry from the messages of OpenSession (already validated)."""
    return HandoffGeometry(
        layers=tuple(geometry.layers),
        heads=geometry.heads,
        head_dim=geometry.head_dim,
        top_k=geometry.top_k,
        page_size=geometry.page_size,
        max_rows=geometry.max_rows,
        max_requests=geometry.max_requests,
        max_context=geometry.max_context,
        slots=slots,
    )


def placement_name(placement: pb.Placement) -> str:
    """As settings and traces write it: `peer_gpu`."""
    return pb.Placement.Name(placement).removeprefix("PLACEMENT_").lower()
