"""The indexer's kernels against what DeepGEMM and vLLM computed on an H200, one check each.

For any implementation: `test_golden.py` runs them with the references, the gates without a GPU run
them in Triton's interpreter. Nothing in the recording was computed by this project, so a fault that
kernel and reference share is seen too.
"""

import torch
from torch import Tensor

from indexer_service.kernels import indexer, k_cache, mqa_logits
from tests.data.recording import TOP_K, Recording

LOGITS_TOLERANCE = 5e-4


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference by norm, over what is not masked."""
    seen = theirs.isfinite()
    difference = (ours.double() - theirs.double())[seen]
    return float(difference.norm() / theirs.double()[seen].norm())


def same_sets(ours: Tensor, theirs: Tensor) -> bool:
    return all(set(a) == set(b) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True))


def decode_arguments(recording: Recording) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    decode = recording.decode
    return decode.q, decode.k_cache, decode.weights, decode.seq_lens, decode.block_table


def decode_logits(recording: Recording, impl: str) -> None:
    theirs = recording.decode.logits
    ours = mqa_logits.paged(*decode_arguments(recording), theirs.shape[1], impl=impl)
    assert torch.equal(ours == -torch.inf, theirs == -torch.inf)
    assert relative_error(ours, theirs) <= LOGITS_TOLERANCE


def prefill_logits(recording: Recording, impl: str) -> None:
    rows = recording.prefill
    ours = mqa_logits.ragged(
        rows.q, rows.k, rows.k_scale, rows.weights, rows.row_start, rows.row_end, impl=impl
    )
    assert torch.equal(ours == -torch.inf, rows.logits == -torch.inf)
    assert relative_error(ours, rows.logits) <= LOGITS_TOLERANCE


def decode_selection(recording: Recording, impl: str) -> None:
    ours = indexer.select_paged(*decode_arguments(recording), TOP_K, impl=impl)
    assert same_sets(ours, recording.attention.topk_indices)


def insert(recording: Recording, impl: str) -> None:
    given, page = recording.insert, 64
    cache = torch.zeros((int(given.slots.max()) // page + 1, page, 132), dtype=torch.uint8)
    k_cache.insert(given.k, given.slots, cache, impl=impl)
    flat = cache.view(len(cache), page * 132)
    values = flat[:, : page * 128].reshape(-1, 128)[given.slots]
    scales = flat[:, page * 128 :].contiguous().view(torch.float32).flatten()[given.slots]
    assert torch.equal(values, given.values)
    assert torch.equal(scales, given.scales.squeeze(1))


CHECKS = (decode_logits, prefill_logits, decode_selection, insert)
