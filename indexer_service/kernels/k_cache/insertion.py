"""`k_cache.insert` in Triton: one kernel, whose bytes are the same on every GPU from SM80 up."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexer_service.kernels.architecture import HOPPER, architecture
from indexer_service.kernels.checks import fault
from indexer_service.kernels.k_cache.layout import SCALE_BYTES, alignment

_FEW_KEYS = 2048
_BLOCKS = ((4, 2), (16, 4))
"""Keys and warps of a program: for up to _FEW_KEYS keys, where more programs start sooner than
fewer ones with more work; and for more of them."""
_VECTOR = 8
"""16-bit values that are read at once."""

_INFINITY = tl.constexpr(0x7F800000)
_SMALLEST_AMAX = tl.constexpr(0x38D1B717)
"""Bits of 1e-4 in fp32."""
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_SUBNORMAL_ULP = tl.constexpr(2.0**14)
"""Of fp32 numbers from here to twice this the last bit is worth 2^-9, as of e4m3's subnormals."""


@triton.jit
def scale_bits(amax_bits):
    """Bits of amax (fp32, at least 1e-4) -> bits of 2^ceil(log2(amax / 448)).

    448 = 1.75 * 2^8: the exponent less 8, and one more where the mantissa is above 1.75, which is
    where adding 0x1FFFFF to it carries.
    """
    return (((amax_bits + 0x1FFFFF) >> 23) - 8) << 23


@triton.jit
def encode_e4m3(magnitude):
    """fp32 >= 0 (NaN too) -> int32 codes, rounded to nearest even; above 448 gives 448.

    Written in 32-bit integers: below SM89 there is no conversion to e4m3.
    """
    clamped = tl.minimum(magnitude, 448.0)
    bits = clamped.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (clamped + _SUBNORMAL_ULP).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.where(clamped < _SMALLEST_NORMAL, subnormal, normal)
    return tl.where(magnitude.to(tl.int32, bitcast=True) > _INFINITY, 0x7F, codes)


@triton.jit
def _store(page, place, inside, codes, scales, DIM: tl.constexpr, PAGE: tl.constexpr,
           BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    at = page + place * DIM
    if ALIGNED > 1:
        at = tl.multiple_of(at, ALIGNED)
    tl.store(at[:, None] + d[None, :], codes, mask=inside[:, None] & (d < DIM)[None, :])
    byte = tl.arange(0, 4)
    at = page + (PAGE * DIM + place * 4)
    if ALIGNED > 1:
        at = tl.multiple_of(at, 4)
    scale_bytes = (scales[:, None] >> (byte * 8)[None, :]) & 0xFF
    tl.store(at[:, None] + byte[None, :], scale_bytes.to(tl.uint8), mask=inside[:, None])


@triton.jit(
    do_not_specialize=("count", "room", "k_stride", "slot_stride", "page_stride", "replica_stride"),
    do_not_specialize_on_alignment=("slots", "k_cache", "replica"),
)
def insert_kernel(
    k, slots, k_cache, replica, count, room: tl.int64, k_stride: tl.int64, slot_stride: tl.int64,
    page_stride: tl.int64, replica_stride: tl.int64,
    DIM: tl.constexpr, PAGE: tl.constexpr, REPLICA: tl.constexpr, ALIGNED: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """KEYS keys, quantised and written to their slots, and once more into `replica`.

    k bf16 or fp16 [T, DIM] with aligned rows, slots int64 [count], caches uint8
    [pages, PAGE, DIM+4], of which `room` is the number of slots. ALIGNED: bytes that each page
    and each key in it is aligned to (16 or 1).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    d = tl.arange(0, BLOCK_D)
    there = key < count
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + key * slot_stride, mask=there, other=-1)
    at = k + tl.multiple_of(key * k_stride, 8)
    values = tl.load(at[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)

    bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    finite = tl.where(magnitude < _INFINITY, magnitude, 0)
    scales = scale_bits(tl.maximum(tl.max(finite, 1), _SMALLEST_AMAX))
    inverse = ((254 << 23) - scales).to(tl.float32, bitcast=True)
    codes = encode_e4m3(magnitude.to(tl.float32, bitcast=True) * inverse[:, None])
    sign = tl.where(magnitude > _INFINITY, 0, (bits >> 24) & 0x80)
    codes = (codes | sign).to(tl.uint8)

    inside = (slot >= 0) & (slot < room)
    page = slot // PAGE
    place = slot % PAGE
    _store(k_cache + page * page_stride, place, inside, codes, scales, DIM, PAGE, BLOCK_D, ALIGNED)
    if REPLICA:
        to = replica + page * replica_stride
        _store(to, place, inside, codes, scales, DIM, PAGE, BLOCK_D, ALIGNED)


def insert(k: Tensor, slots: Tensor, k_cache: Tensor, replica: Tensor | None) -> None:
    """See `k_cache.insert`; arguments are already checked."""
    count = len(slots)
    pages, page, width = k_cache.shape
    if not (count and pages):
        return
    dim = width - SCALE_BYTES
    k = _aligned_rows(k)
    aligned = alignment(k_cache)
    if replica is not None:
        aligned = min(aligned, alignment(replica))
        if replica.device != k_cache.device:
            _reach(k_cache.device, replica.device)
    second = k_cache if replica is None else replica
    block, warps = _BLOCKS[count > _FEW_KEYS]
    dependent = k.device.type == "cuda" and architecture(k.device) >= HOPPER
    insert_kernel[(-(-count // block),)](
        k, slots, k_cache, second, count, pages * page, k.stride(0), slots.stride(0),
        k_cache.stride(0), second.stride(0),
        DIM=dim, PAGE=page, REPLICA=replica is not None, ALIGNED=aligned, KEYS=block,
        BLOCK_D=1 << (dim - 1).bit_length(), PDL=dependent, num_warps=warps,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip


def _aligned_rows(k: Tensor) -> Tensor:
    """`k`, or a copy where its rows do not lie as the kernel reads them."""
    if k.stride(1) == 1 and not (k.stride(0) % _VECTOR or k.data_ptr() % (2 * _VECTOR)):
        return k
    keys, dim = k.shape
    rows = k.new_empty((keys, dim + -dim % _VECTOR))
    rows[:, :dim] = k
    return rows


@cache
def _reach(here: torch.device, there: torch.device) -> None:
    """Lets kernels of one GPU write another's memory; torch does it with its first copy.

    Raises:
        ValueError: the two GPUs cannot.
    """
    if not torch.cuda.can_device_access_peer(here, there):
        raise fault("replica", f"{here} cannot write to {there}", "choose GPUs with peer access")
    torch.zeros(1, device=here).to(there)
