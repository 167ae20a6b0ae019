"""What a request must satisfy by itself, before any state is looked at."""

from collections.abc import Sequence
from itertools import pairwise

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.errors import ServiceError, exhausted, invalid, precondition, shown
from indexer_service.kernels.limits import HEAD_DIM, HEADS, MAX_TOP_K, PAGE_SIZES
from ipc_handoff.banks import BANK_REGIONS, CONTROL, K_CACHE_PREFIX
from ipc_handoff.flag_words import FLAGS
from ipc_handoff.layout import LAYOUT_VERSION, HandoffGeometry
from ipc_handoff.wire import handoff_geometry

MAX_LAYERS = 1024
MAX_SLOTS = 64
# A step's staging must not be written over before the worker's next publication shows.
MIN_SLOTS_ON_GPU = 2
# Lengths are staged as int32.
MAX_CONTEXT = 2**31 - 1
MAX_GROUP = 1024
MODELS = ("target", "draft")
_NAME_CHARACTERS = 128
_HOST_REGIONS = (CONTROL, FLAGS)


def checked_worker(worker: pb.Worker) -> pb.Worker:
    """The worker with its defaults filled in.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    filled = pb.Worker()
    filled.CopyFrom(worker)
    # It is kept, and shown by GetStatus: nothing unchecked may ride along.
    filled.DiscardUnknownFields()
    _check_name("worker.instance", worker.instance, "a UUID made once in the worker's life")
    for field in ("engine", "gpu_uuid"):
        if len(getattr(worker, field)) > _NAME_CHARACTERS:
            raise _too_long(f"worker.{field}", getattr(worker, field))
    filled.model = worker.model or MODELS[0]
    if filled.model not in MODELS:
        raise invalid("worker.model", shown(worker.model), f"one of {', '.join(MODELS)}")
    if worker.HasField("group"):
        _check_group(worker.group)
    return filled


def _check_group(group: pb.Group) -> None:
    _check_name("worker.group.name", group.name, "the name that all ranks share")
    if not 1 <= group.size <= MAX_GROUP:
        raise invalid("worker.group.size", f"{group.size}", f"1 to {MAX_GROUP} ranks")
    if group.rank >= group.size:
        raise invalid(
            "worker.group.rank", f"{group.rank} of {group.size}", "0 to worker.group.size - 1"
        )


def _check_name(field: str, text: str, wanted: str) -> None:
    if not text:
        raise invalid(field, "is empty", wanted)
    if len(text) > _NAME_CHARACTERS:
        raise _too_long(field, text)


def _too_long(field: str, text: str) -> ServiceError:
    return invalid(field, f"{len(text)} characters", f"at most {_NAME_CHARACTERS}")


def checked_geometry(
    request: pb.OpenSessionRequest, max_bank_bytes: int, *, on_gpu: bool
) -> HandoffGeometry:
    """The geometry and layout that a session asks for.

    Args:
        on_gpu: the session's selections are computed on a GPU.

    Raises:
        ServiceError: INVALID_ARGUMENT; FAILED_PRECONDITION for another layout than ours;
            RESOURCE_EXHAUSTED for banks over `max_bank_bytes`.
    """
    if not request.HasField("geometry"):
        raise invalid("geometry", "is missing", "say the indexer's shape")
    if not request.HasField("layout"):
        raise invalid("layout", "is missing", "say version, fingerprint and slots")
    _check_geometry(request.geometry)
    if request.layout.version != LAYOUT_VERSION:
        raise precondition(
            "layout.version",
            f"{request.layout.version}, the service has {LAYOUT_VERSION}",
            "the same dsa-indexer version on both sides",
        )
    fewest = MIN_SLOTS_ON_GPU if on_gpu else 1
    if not fewest <= request.layout.slots <= MAX_SLOTS:
        where = " on a GPU" if on_gpu else ""
        raise invalid("layout.slots", f"{request.layout.slots}{where}", f"{fewest} to {MAX_SLOTS}")
    geometry = handoff_geometry(request.geometry, request.layout.slots)
    size = geometry.control.size + geometry.staging.size + geometry.answers.size
    if size > max_bank_bytes:
        raise exhausted(
            "geometry",
            f"its banks take {size} bytes, the limit is {max_bank_bytes}",
            "smaller max_rows, max_requests, max_context or slots, or raise max_bank_bytes",
        )
    if request.layout.fingerprint != geometry.fingerprint:
        raise precondition(
            "layout.fingerprint",
            f"{request.layout.fingerprint:#x}, the service computes {geometry.fingerprint:#x}",
            "the same dsa-indexer version on both sides",
        )
    return geometry


def _check_geometry(geometry: pb.Geometry) -> None:
    _check_layers(geometry.layers)
    if geometry.heads not in HEADS:
        raise invalid("geometry.heads", f"{geometry.heads}", f"one of {_listed(HEADS)}")
    if geometry.head_dim != HEAD_DIM:
        raise invalid("geometry.head_dim", f"{geometry.head_dim}", f"{HEAD_DIM}")
    if not 1 <= geometry.top_k <= MAX_TOP_K:
        raise invalid("geometry.top_k", f"{geometry.top_k}", f"1 to {MAX_TOP_K}")
    if geometry.page_size not in PAGE_SIZES:
        raise invalid(
            "geometry.page_size", f"{geometry.page_size}", f"one of {_listed(PAGE_SIZES)}"
        )
    if geometry.k_cache_layout not in (
        pb.K_CACHE_LAYOUT_UNSPECIFIED,
        pb.K_CACHE_LAYOUT_PLANAR_E4M3,
    ):
        raise invalid(
            "geometry.k_cache_layout",
            f"{geometry.k_cache_layout}",
            "K_CACHE_LAYOUT_PLANAR_E4M3",
        )
    for field in ("max_rows", "max_requests", "max_context"):
        if getattr(geometry, field) < 1:
            raise invalid(f"geometry.{field}", "0", "at least 1")
    if geometry.max_context > MAX_CONTEXT:
        raise invalid("geometry.max_context", f"{geometry.max_context}", f"at most {MAX_CONTEXT}")


def _check_layers(layers: Sequence[int]) -> None:
    if not 1 <= len(layers) <= MAX_LAYERS:
        raise invalid("geometry.layers", f"{len(layers)} layers", f"1 to {MAX_LAYERS}")
    if any(after <= before for before, after in pairwise(layers)):
        raise invalid("geometry.layers", "not ascending", "each layer once, in ascending order")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def most_regions(layers: Sequence[int], bank: Sequence[str] = BANK_REGIONS) -> int:
    """How many names a session's regions can have."""
    return len(bank) + len(layers)


def checked_regions(
    regions: Sequence[pb.Region],
    layers: Sequence[int],
    *,
    on_gpu: bool,
    bank: Sequence[str] = BANK_REGIONS,
) -> None:
    """Names and memory of regions to register.

    Args:
        on_gpu: the session's selections are computed on a GPU.
        bank: names of the regions that the session has beside K caches.

    Raises:
        ServiceError: INVALID_ARGUMENT; FAILED_PRECONDITION for memory of another kind than the
            session's.
    """
    most = most_regions(layers, bank)
    if not regions:
        raise invalid("regions", "is empty", "name at least one region")
    if len(regions) > most:
        raise invalid("regions", f"{len(regions)} regions", f"at most {most}: each name once")
    known = {str(layer) for layer in layers}
    for i, region in enumerate(regions):
        field = f"regions[{i}]"
        layer = region.name.removeprefix(K_CACHE_PREFIX)
        if region.name.startswith(K_CACHE_PREFIX):
            if layer not in known:
                raise invalid(
                    f"{field}.name",
                    f"{shown(region.name)} is of a layer without an indexer",
                    "a layer of the session's geometry",
                )
        elif region.name not in bank:
            raise invalid(
                f"{field}.name",
                f"{shown(region.name)} is unknown",
                f"one of {', '.join(bank)}, {K_CACHE_PREFIX}<layer>",
            )
        _check_memory(region, on_gpu)


def _check_memory(region: pb.Region, on_gpu: bool) -> None:
    """Raise unless the region lies in the kind of memory that its session can use."""
    if not (region.HasField("cuda_ipc") or region.HasField("host")):
        raise invalid(f"{region.name}.memory", "is missing", "say host or cuda_ipc")
    if region.HasField("cuda_ipc") and not on_gpu:
        raise precondition(
            f"{region.name}.cuda_ipc",
            "this service runs on the CPU",
            "host memory, or a service on the GPU",
        )
    if region.HasField("cuda_ipc") and region.name in _HOST_REGIONS:
        raise invalid(f"{region.name}.cuda_ipc", "it is host memory", "say host")
    if region.HasField("host") and on_gpu and region.name not in _HOST_REGIONS:
        raise precondition(
            f"{region.name}.host",
            "host memory, and this session's steps run on a GPU",
            "device memory: say cuda_ipc",
        )


def checked_names(
    names: Sequence[str], layers: Sequence[int], bank: Sequence[str] = BANK_REGIONS
) -> None:
    """Names of regions to give back.

    Args:
        layers: of the session. bank: as for `checked_regions`.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    most = most_regions(layers, bank)
    if not names:
        raise invalid("names", "is empty", "name at least one region")
    if len(names) > most:
        raise invalid("names", f"{len(names)} names", f"at most {most}: each region once")
    for i, name in enumerate(names):
        _check_name(f"names[{i}]", name, "the name of a registered region")
    if len(set(names)) != len(names):
        raise invalid("names", "a name stands twice", "name each region once")


def checked_single_layer(plan: pb.StepPlan) -> None:
    """The plan of a SelectTopK.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if len(plan.layers) != 1:
        raise invalid("plan.layers", f"{len(plan.layers)} layers", "exactly one")
