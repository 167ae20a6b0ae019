"""What is compiled of device_inputs."""

from ipc_handoff.kernels.found import tell_found
from tests.gates.kernels import Build

_POINTERS = (
    "numbers", "query_start", "seq_lens", "block_table", "lengths", "table", "faults", "row_ends",
)  # fmt: skip
_TOLD = ("step", "positions", "slots")
_COUNTS = ("max_requests", "given", "width", "pages", "page_size", "tells_faults")


def _build(row_ends: bool, tells: bool) -> Build:
    types = dict.fromkeys(_POINTERS, "*i32") | dict.fromkeys(_COUNTS, "i32")
    types |= dict.fromkeys(_TOLD, "*i64") | {"table_stride": "i64"}
    constants = dict(ROW_ENDS=row_ends, COLUMNS=512, PTX=True, POSITIONS=tells, SLOTS=tells)
    if tells:
        types |= dict(tell=("*i64", "*i64"))
    else:
        constants |= dict(tell=None)
    return Build(
        f"copy_checked row_ends {row_ends}" + tells * ", and tells",
        "indexer_service.kernels.device_inputs:copy_checked_kernel",
        types,
        constants | dict(TELL=tell_found if tells else None),
        {"num_warps": 4},
        unaligned=(*_POINTERS, *_TOLD),
    )


BUILDS = [_build(False, False), _build(True, False), _build(True, True)]
