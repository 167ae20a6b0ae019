"""What is compiled of device_inputs."""

from tests.gates.kernels import Build

_POINTERS = (
    "numbers", "query_start", "seq_lens", "block_table", "lengths", "table", "faults", "row_ends",
)  # fmt: skip
_COUNTS = ("max_requests", "given", "width", "pages", "page_size")

BUILDS = [
    Build(
        f"copy_checked row_ends {row_ends}",
        "indexer_service.kernels.device_inputs:copy_checked_kernel",
        dict.fromkeys(_POINTERS, "*i32") | dict.fromkeys(_COUNTS, "i32") | {"table_stride": "i64"},
        {"ROW_ENDS": row_ends, "COLUMNS": 512},
        {"num_warps": 4},
        unaligned=_POINTERS,
    )
    for row_ends in (False, True)
]
