"""Writing a step's inputs into its slot of the bank, and reading its answers from there.

The order is the protocol's: data first, then the doorbell word, then the wake-up.
"""

from typing import cast

import torch

from indexer_client.attachment import Attachment
from indexer_client.inputs import StepInputs
from ipc_handoff.banks import HostBank
from ipc_handoff.layout import HandoffGeometry

_NO_PAGE = -1
_E4M3 = (torch.float8_e4m3fn, torch.uint8)


def publish(attachment: Attachment, step: int, inputs: StepInputs) -> None:
    """Stage what all layers of a step share, then say so."""
    generations = attachment.bank.control.generations.inputs
    generations.begin(step)
    slot = _bank(attachment).staging_of(step)
    slot.query_start[: inputs.requests + 1].copy_(inputs.query_start)
    slot.seq_lens[: inputs.requests].copy_(inputs.seq_lens)
    width = inputs.block_table.shape[1]
    table = slot.block_table[: inputs.requests]
    table[:, :width].copy_(inputs.block_table)
    # Behind it stand the pages of an older step: a length that reaches there must not find them.
    table[:, width:].fill_(_NO_PAGE)
    generations.end(step)
    attachment.bells.publish(step)
    attachment.wake_service.ring()


def stage_layer(
    attachment: Attachment, step: int, layer: int, q: torch.Tensor, weights: torch.Tensor
) -> None:
    """Stage q and weights of one layer (an ordinal)."""
    generations = attachment.bank.control.generations.layers
    generations.begin(step, layer)
    slot = _bank(attachment).staging_of(step)
    slot.q[: len(q)].view(torch.uint8).copy_(q.view(torch.uint8))
    slot.weights[: len(weights)].copy_(weights)
    generations.end(step, layer)


def request(attachment: Attachment, step: int, layer: int) -> None:
    """Ring for a layer (an ordinal) that is staged."""
    attachment.bells.request(layer, step)
    attachment.wake_service.ring()


def answers(attachment: Attachment, step: int, rows: int) -> torch.Tensor:
    """int32 [rows, top_k], in place; valid once the layer's answer has been waited for."""
    return _bank(attachment).answers_of(step)[:rows]


def check_tensors(
    geometry: HandoffGeometry,
    rows: int,
    q: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Raise ValueError, naming the tensor, unless all fit the step."""
    for name, tensor, dtypes, shape in (
        ("q", q, _E4M3, (rows, geometry.heads, geometry.head_dim)),
        ("weights", weights, (torch.float32,), (rows, geometry.heads)),
        ("out", out, (torch.int32,), (rows, geometry.top_k)),
    ):
        if tensor.dtype not in dtypes or tensor.shape != shape:
            raise ValueError(
                f"{name}: {tensor.dtype} {list(tensor.shape)} (fix: {dtypes[0]} {list(shape)})"
            )


def _bank(attachment: Attachment) -> HostBank:
    """The CPU's sessions have no other banks."""
    return cast(HostBank, attachment.bank)
