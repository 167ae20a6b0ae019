"""How the data contract's terms are written in the control contract's messages."""

from dsa_indexer.v1 import indexer_pb2 as pb
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
