"""Shared memory: what cannot be opened, and what does not fit."""

import fcntl
import os
import socket
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipc_handoff.errors import RegionError
from ipc_handoff.regions import DTYPES, HostMemory, TensorSpec
from tests.ipc_handoff.properties import unhurried
from tests.support.descriptors import no_descriptor_leaks

SIZE = 1 << 16
BYTES = TensorSpec((SIZE,), torch.uint8)
NONCE = bytes(range(16))


# What cannot be opened.


def sealed(seals: int, size: int = SIZE) -> int:
    descriptor = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def read_only_descriptor() -> int:
    descriptor = sealed(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    os.close(descriptor)
    return again


def pipe_end() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


BOTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
SEAL_WRITE = 0x0008  # F_SEAL_WRITE
REFUSED: dict[str, tuple[Callable[[], int], str]] = {
    "a file": (lambda: os.open(__file__, os.O_RDONLY), "not a memfd sealed"),
    "a pipe": (pipe_end, "not a memfd sealed"),
    "an eventfd": (lambda: os.eventfd(0), "not a memfd sealed"),
    "a socket": (lambda: socket.socket(socket.AF_UNIX).detach(), "not a memfd sealed"),
    "a directory": (lambda: os.open("/", os.O_RDONLY), "not a memfd sealed"),
    "the null device": (lambda: os.open("/dev/null", os.O_RDWR), "not a memfd sealed"),
    "an unsealed memfd": (lambda: sealed(0), "not a memfd sealed"),
    "a memfd that can shrink": (lambda: sealed(fcntl.F_SEAL_GROW), "not a memfd sealed"),
    "a memfd that can grow": (lambda: sealed(fcntl.F_SEAL_SHRINK), "not a memfd sealed"),
    "an empty memfd": (lambda: sealed(BOTH, 0), "the memory is empty"),
    "a memfd sealed against writing": (lambda: sealed(BOTH | SEAL_WRITE), "cannot be mapped"),
    "a memfd opened for reading": (read_only_descriptor, "cannot be mapped"),
    "a memfd larger than all addresses": (lambda: sealed(BOTH, 1 << 62), "cannot be mapped"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_and_closed(what: str) -> None:
    make, reason = REFUSED[what]
    with no_descriptor_leaks():
        descriptor = make()
        with pytest.raises(RegionError, match=reason):
            HostMemory.open(descriptor, writable=True)
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_planted_open_without_the_seal_check_maps_an_unsealed_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ipc_handoff.regions._SEALS", 0)
    descriptor = sealed(0)
    memory = HostMemory.open(descriptor, writable=True)
    os.ftruncate(descriptor, 0)
    memory.close()


@pytest.mark.parametrize("size", [0, -1])
def test_memory_of_no_size_cannot_be_made(size: int) -> None:
    with no_descriptor_leaks(), pytest.raises(RegionError, match=r"x\.byte_size"):
        HostMemory.create(size, "x")


@pytest.mark.parametrize("size", [1 << 62, 1 << 63])
def test_memory_that_the_system_cannot_give_is_refused_without_a_leak(size: int) -> None:
    with no_descriptor_leaks(), pytest.raises(RegionError, match=r"x\.byte_size"):
        HostMemory.create(size, "x")


# What does not fit.


@pytest.fixture(scope="module")
def memory() -> HostMemory:
    return HostMemory.create(4096, "views")


U8, I32, F8 = torch.uint8, torch.int32, torch.float8_e4m3fn
BAD: dict[str, tuple[int, int, TensorSpec, str]] = {
    "no dimensions": (0, 64, TensorSpec((), U8), r"answers\.shape"),
    "a dimension of 0": (0, 64, TensorSpec((4, 0), U8), r"answers\.shape"),
    "a negative dimension": (0, 64, TensorSpec((-4,), U8), r"answers\.shape"),
    "two negative dimensions": (0, 64, TensorSpec((-2, -2), U8), r"answers\.shape"),
    "too few strides": (0, 64, TensorSpec((2, 2), U8, (2,)), r"answers\.strides"),
    "too many strides": (0, 64, TensorSpec((2,), U8, (1, 1)), r"answers\.strides"),
    "a negative stride": (0, 64, TensorSpec((2, 2), U8, (-2, 1)), r"answers\.strides"),
    "a shape beyond its bytes": (0, 63, TensorSpec((64,), U8), r"answers\.byte_size: 63, but"),
    "strides beyond their bytes": (0, 64, TensorSpec((2, 2), U8, (64, 1)), r"answers\.byte_size"),
    "elements beyond their bytes": (0, 64, TensorSpec((17,), I32), r"answers\.byte_size"),
    "an end beyond the memory": (
        4064,
        64,
        TensorSpec((64,), U8),
        r"answers\.byte_size: bytes 4064",
    ),
    "a start beyond the memory": (4096, 1, TensorSpec((1,), U8), r"answers\.byte_size"),
    "a huge start": (1 << 63, 1, TensorSpec((1,), U8), r"answers\.byte_size"),
    "a negative start": (-4, 64, TensorSpec((64,), U8), r"answers\.byte_size"),
    "no bytes": (0, 0, TensorSpec((1,), U8), r"answers\.byte_size"),
    "an odd start of int32": (2, 64, TensorSpec((4,), I32), r"answers\.offset: 2"),
    "an odd start of bfloat16": (1, 64, TensorSpec((4,), torch.bfloat16), r"answers\.offset: 1"),
    "an odd start of int64": (12, 64, TensorSpec((4,), torch.int64), r"answers\.offset: 12"),
    "a shape of 2**62 * 4 elements": (0, 64, TensorSpec((1 << 62, 4), U8, (0, 1)), "answers"),
    "a shape of 2**63 elements": (0, 64, TensorSpec((1 << 63,), U8, (0,)), "answers"),
    "strides whose reach is past 2**64": (
        0,
        64,
        TensorSpec((3, 3), U8, (1 << 63, 1 << 63)),
        r"answers\.byte_size",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_view_is_refused_with(what: str, memory: HostMemory) -> None:
    offset, byte_size, spec, message = BAD[what]
    with pytest.raises(RegionError, match=message) as refused:
        memory.tensor(offset, byte_size, spec, "answers")
    assert "(fix: " in str(refused.value)


@unhurried
@given(
    offset=st.integers(-8, 4104),
    byte_size=st.integers(-8, 4104),
    shape=st.lists(st.integers(-1, 70), min_size=1, max_size=3),
    strides=st.lists(st.integers(-1, 70), max_size=3),
    dtype=st.sampled_from(list(DTYPES.values())),
)
def test_a_view_is_refused_or_stays_inside_its_bytes(
    offset: int, byte_size: int, shape: list[int], strides: list[int], dtype: torch.dtype
) -> None:
    memory = HostMemory.create(4096, "property")
    raw = memory.tensor(0, 4096, TensorSpec((4096,), U8), "all")
    try:
        view = memory.tensor(
            offset, byte_size, TensorSpec(tuple(shape), dtype, tuple(strides)), "x"
        )
    except RegionError as error:
        assert str(error).startswith("x.")
        return
    assert view.shape == tuple(shape)
    assert view.dtype == dtype
    assert view.data_ptr() == raw.data_ptr() + offset
    if strides:
        assert view.stride() == tuple(strides)
    last = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    assert offset + (last + 1) * dtype.itemsize <= offset + byte_size <= 4096


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_viewed_bit_by_bit(name: str, memory: HostMemory) -> None:
    dtype = DTYPES[name]
    memory.view()[:64] = bytes(range(64))
    view = memory.tensor(0, 64, TensorSpec((64 // dtype.itemsize,), dtype), "x")
    assert bytes(view.view(U8).tolist()) == bytes(range(64))


def test_pages_of_a_cache_inside_a_larger_allocation(memory: HostMemory) -> None:
    """vLLM's K cache: pages of one layer lie apart by the pages of all layers."""
    raw = memory.tensor(0, 4096, TensorSpec((4096,), U8), "all")
    raw.copy_(torch.arange(4096) % 253)
    pages = memory.tensor(256, 3840, TensorSpec((4, 3, 44), U8, (1024, 44, 1)), "k_cache/3")
    for page in range(4):
        begin = 256 + page * 1024
        assert torch.equal(pages[page].flatten(), raw[begin : begin + 132])
