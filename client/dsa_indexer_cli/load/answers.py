"""Whether an answer is right: bit for bit, and against scores in float64."""

import torch
from torch import Tensor

from indexer_client import StepInputs
from indexer_service.kernels import mqa_logits

_NONE = -1
_SHOWN = 8
_TOLERANCE = 5e-3
"""Of a row's scores, in parts of their root mean square: kernels round to fp32 many times, and
fp8 units of tensor cores add up in less. Keys nearer to the k-th score may be chosen or not."""


def first_difference(answer: Tensor, expected: Tensor) -> str:
    """Where an answer has other bits; empty if nowhere.

    Args:
        answer: int32 [n, k]; rows behind the expected ones are to be padding.
        expected: int32 [rows, k].
    """
    rows = len(expected)
    bad = (answer[:rows] != expected).any(dim=1).nonzero().flatten().tolist()
    if bad:
        return (
            f"rows {bad[:_SHOWN]}: {answer[bad[0], :_SHOWN].tolist()}... instead of "
            f"{expected[bad[0], :_SHOWN].tolist()}..."
        )
    if bool((answer[rows:] != _NONE).any()):
        return f"a row behind the step's {rows} is not {_NONE}"
    return ""


def exact_scores(
    row: int, q: Tensor, weights: Tensor, k_cache: Tensor, inputs: StepInputs
) -> Tensor:
    """float32 [n]: scores, computed in float64, of the n keys that a row sees.

    Args:
        q: e4m3 bytes [rows, heads, head_dim]; weights: float32 [rows, heads].
        k_cache: uint8 [pages, page, head_dim + 4], of the layer.
        inputs: with `exact_query_start` and `exact_seq_lens`.
    """
    starts, lengths = inputs.exact_query_start, inputs.exact_seq_lens
    assert starts is not None and lengths is not None
    request = next(r for r in range(inputs.requests) if row < starts[r + 1])
    seen = lengths[request] - starts[request + 1] + 1 + row
    length = torch.tensor([seen], dtype=torch.int32, device=q.device)
    table = inputs.block_table[request : request + 1]
    one = slice(row, row + 1)
    scores = mqa_logits.paged(
        q[one].unsqueeze(1), k_cache, weights[one], length, table, seen, impl="reference"
    )
    return scores[0]


def contradiction(answer: Tensor, scores: Tensor) -> str:
    """What contradicts a row's exact scores in its answer; empty if nothing does.

    Args:
        answer: int32 [k]. scores: float32 [n], of the keys that the row sees.
    """
    k, keys = len(answer), len(scores)
    count = min(k, keys)
    chosen, padding = answer[:count].long(), answer[count:]
    if bool((padding != _NONE).any()):
        return f"more than its {keys} keys are chosen"
    if bool(((chosen < 0) | (chosen >= keys)).any()):
        return f"chosen {int(chosen.min())} to {int(chosen.max())}, of {keys} keys"
    if len(torch.unique(chosen)) != count:
        return "a key is chosen twice"
    values = scores.double()
    threshold = values.topk(count).values[-1]
    slack = _TOLERANCE * values.square().mean().sqrt()
    if bool((low := values[chosen] < threshold - slack).any()):
        key = int(chosen[low][0])
        return f"key {key} scores {float(values[key]):.6g}, the {count}th best {threshold:.6g}"
    missed = values > threshold + slack
    missed[chosen] = False
    if bool(missed.any()):
        key = int(missed.nonzero()[0])
        return f"key {key} is not chosen, and scores {float(values[key]):.6g} of {threshold:.6g}"
    return ""
