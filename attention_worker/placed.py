"""Tensors that kernels read by their addresses: on the worker's device, without holes in a row.

A kernel that is given another stride than it goes by reads, or stages, other values: no error
would say so.
"""

import torch
from torch import Tensor

from indexer_client.inputs import StepInputs


def check_placed(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless the tensor is on the device and its rows are contiguous.

    Rows are along the first axis; of one axis only, all of it is contiguous.
    """
    if tensor.device != device:
        raise ValueError(f"{name}: on {tensor.device} (fix: {device}, where the worker is)")
    rows = tensor if tensor.dim() == 1 else tensor[0]
    if not rows.is_contiguous():
        raise ValueError(
            f"{name}: strides {list(tensor.stride())} of {list(tensor.shape)} (fix: contiguous "
            f"rows, as {name}.contiguous() has)"
        )


def check_inputs(inputs: StepInputs, device: torch.device) -> None:
    """As `check_placed`, of a step's tensors."""
    check_placed("query_start", inputs.query_start, device)
    check_placed("seq_lens", inputs.seq_lens, device)
    check_placed("block_table", inputs.block_table, device)
    for name, tensor in (("positions", inputs.positions), ("slots", inputs.slots)):
        if tensor is not None:
            check_placed(name, tensor, device)
