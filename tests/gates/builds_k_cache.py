"""What is compiled of k_cache."""

from tests.gates.kernels import ARCHITECTURES, Build

_HERE = "indexer_service.kernels.k_cache"


def _insert(
    dtype: str, replica: bool, aligned: int, keys: int, architectures: tuple[int, ...]
) -> Build:
    strides = ("room", "k_stride", "slot_stride", "page_stride", "replica_stride")
    return Build(
        f"insert {dtype} replica {replica} aligned {aligned} keys {keys}",
        f"{_HERE}.insertion:insert_kernel",
        dict(k=dtype, slots="*i64", k_cache="*u8", replica="*u8", count="i32")
        | dict.fromkeys(strides, "i64"),
        dict(DIM=128, PAGE=64, REPLICA=replica, ALIGNED=aligned, KEYS=keys, BLOCK_D=128,
             PDL=architectures[0] >= 90),
        dict(num_warps={4: 2, 16: 4}[keys]), architectures,
        unaligned=("slots", "k_cache", "replica"),
    )  # fmt: skip


def _gather(aligned: int, switched: bool = False) -> Build:
    counts = ("requests", "columns", "pages")
    strides = ("total", "page_stride", "table_row", "table_column", "length_stride")
    return Build(
        f"gather aligned {aligned} switched {switched}", f"{_HERE}.gathering:gather_kernel",
        dict(k_cache="*u8", block_table="*i32", seq_lens="*i32", values="*u8", scales="*u8")
        | ({"enabled": "*i32"} if switched else {})
        | dict.fromkeys(counts, "i32") | dict.fromkeys(strides, "i64"),
        dict(DIM=128, PAGE=64, ALIGNED=aligned, KEYS=64, BLOCK_D=128, CHUNK=128)
        | ({} if switched else {"enabled": None}),
        dict(num_warps=2), unaligned=("k_cache", "block_table", "seq_lens", "enabled"),
    )  # fmt: skip


_OLD = tuple(arch for arch in ARCHITECTURES if arch < 90)
_NEW = tuple(arch for arch in ARCHITECTURES if arch >= 90)

BUILDS = [
    *(
        _insert(dtype, replica, aligned, keys, group)
        for group in (_OLD, _NEW)
        for dtype, replica, aligned, keys in (
            ("*bf16", False, 16, 4), ("*bf16", True, 16, 16), ("*fp16", False, 1, 16),
        )
    ),
    _gather(16),
    _gather(16, switched=True),
    _gather(1),
]  # fmt: skip
