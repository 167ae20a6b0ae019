"""Argument checks: every error is a ValueError `name: what is wrong (fix: what to do)`."""

from collections.abc import Sequence

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


def fault(name: str, wrong: str, fix: str) -> ValueError:
    """The error for the argument `name`; the caller raises it."""
    return ValueError(f"{name}: {wrong} (fix: {fix})")


def expect(
    name: str,
    tensor: Tensor,
    layout: str,
    shape: Sequence[int | None],
    dtypes: torch.dtype | Sequence[torch.dtype],
    device: torch.device | None = None,
) -> Tensor:
    """Returns `tensor` if it has the shape (None: any size), a dtype and the device asked for.

    Args:
        layout: the shape in symbols, for the message: "[B, next_n, H, D]".

    Raises:
        ValueError: naming `name`, what it has and what it should have.
    """
    # Runs before every launch: nothing is put together for a message unless something is wrong.
    if not isinstance(tensor, Tensor):
        raise fault(name, f"{type(tensor).__name__} is not a tensor", f"give a tensor {layout}")
    if not _fits(tensor.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        meant = f"{layout} = [{wanted}]"
        raise fault(name, f"shape {list(tensor.shape)} is not {meant}", f"give {layout}")
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise fault(name, f"dtype {tensor.dtype} is not {names}", "convert or view it first")
    if device is not None and tensor.device != device:
        raise fault(name, f"on {tensor.device}, the first tensor on {device}", "use one device")
    return tensor


def _fits(have: Sequence[int], wanted: Sequence[int | None]) -> bool:
    if len(have) != len(wanted):
        return False
    for size, other in zip(have, wanted, strict=True):
        if other is not None and size != other:
            return False
    return True


def expect_rows(
    name: str,
    tensor: Tensor,
    layout: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """As `expect`, for an output [rows, n]: rows may lie anywhere, each must be contiguous."""
    expect(name, tensor, layout, shape, dtype, device)
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise fault(name, f"stride(1) is {tensor.stride(1)}, not 1", "give contiguous rows")
    return tensor


def e4m3_bytes(name: str, tensor: Tensor, layout: str, shape: Sequence[int | None]) -> Tensor:
    """The bytes (uint8 view) of an e4m3 tensor, which may come as float8_e4m3fn or as uint8."""
    return expect(name, tensor, layout, shape, (E4M3, torch.uint8)).view(torch.uint8)


def positive(name: str, value: int) -> int:
    """Returns `value` if it is a whole number above zero."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise fault(name, f"{value!r} is not a positive whole number", f"give {name} >= 1")
    return value
