"""The references against what vLLM, DeepGEMM and FlashMLA computed on an H200."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention_worker.kernels import sparse_mla
from indexer_service.kernels import indexer, k_cache, mqa_logits
from tests.data.recording import TOP_K, Recording
from tests.kernels.recorded_checks import (
    CHECKS,
    LOGITS_TOLERANCE,
    decode_arguments,
    relative_error,
    same_sets,
)

ATTENTION_TOLERANCE = 4e-3


def attend(recording: Recording, indices: Tensor) -> Tensor:
    attention = recording.attention
    slots = sparse_mla.to_slots(
        indices, torch.arange(2, dtype=torch.int32), attention.block_table, 64
    )
    return sparse_mla.attend(attention.q, attention.kv_cache, slots, attention.scale)


@pytest.mark.parametrize("check", CHECKS)
def test_what_was_recorded(check: Callable[[Recording, str], None], recording: Recording) -> None:
    check(recording, "reference")


def test_prefill_keys_in_pages_score_the_same_bits(recording: Recording) -> None:
    rows, page = recording.prefill, 64
    pages = -(-len(rows.k) // page)
    keys = torch.zeros((pages * page, 128), dtype=torch.uint8)
    scales = torch.zeros(pages * page)
    keys[: len(rows.k)], scales[: len(rows.k)] = rows.k, rows.k_scale
    planes = [keys.view(pages, -1), scales.view(torch.uint8).view(pages, -1)]
    cache = torch.cat(planes, dim=1).view(pages, page, 132)
    table = torch.arange(pages, dtype=torch.int32)

    values, gathered = k_cache.gather(
        cache, table.view(1, -1), torch.tensor([len(rows.k)], dtype=torch.int32)
    )
    assert torch.equal(values.view(torch.uint8), rows.k)
    assert torch.equal(gathered, rows.k_scale)

    first = rows.row_start == 0  # a paged row sees its request from the start
    paged = mqa_logits.paged(
        rows.q[first].unsqueeze(1), cache, rows.weights[first], rows.row_end[first],
        table.expand(int(first.sum()), -1), len(rows.k),
    )  # fmt: skip
    ragged = mqa_logits.ragged(rows.q, values, gathered, rows.weights, rows.row_start, rows.row_end)
    assert torch.equal(paged, ragged[first])


def test_attention_matches_flashmla(recording: Recording) -> None:
    ours = attend(recording, recording.attention.topk_indices)
    assert relative_error(ours, recording.attention.out) <= ATTENTION_TOLERANCE


def test_attention_over_our_own_selection_matches_flashmla(recording: Recording) -> None:
    ours = attend(recording, indexer.select_paged(*decode_arguments(recording), TOP_K))
    assert relative_error(ours, recording.attention.out) <= ATTENTION_TOLERANCE


def test_planted_selection_shifted_by_one_is_noticed(recording: Recording) -> None:
    chosen = recording.attention.topk_indices
    shifted = torch.where(chosen > 0, chosen - 1, chosen)
    assert not same_sets(shifted, chosen)
    assert (
        relative_error(attend(recording, shifted), recording.attention.out)
        > 10 * ATTENTION_TOLERANCE
    )


def test_planted_rows_swapped_are_noticed(recording: Recording) -> None:
    q, cache, weights, seq_lens, table = decode_arguments(recording)
    swapped = indexer.select_paged(q.flip(0), cache, weights, seq_lens, table, TOP_K)
    assert not same_sets(swapped[1:], recording.attention.topk_indices[1:])


def test_planted_wrong_page_is_noticed(recording: Recording) -> None:
    q, cache, weights, seq_lens, table = decode_arguments(recording)
    moved = table.clone()
    moved[1, 3] = table[1, 4]
    ours = mqa_logits.paged(q, cache, weights, seq_lens, moved, recording.decode.logits.shape[1])
    assert relative_error(ours, recording.decode.logits) > LOGITS_TOLERANCE


def test_planted_interleaved_page_layout_is_noticed(recording: Recording) -> None:
    # The scale right after each token's values, as the tensor's shape [pages, page, 132] suggests.
    q, cache, weights, seq_lens, table = decode_arguments(recording)
    flat = cache.view(len(cache), -1)
    values, scales = flat[:, :8192].unflatten(1, (64, 128)), flat[:, 8192:].unflatten(1, (64, 4))
    misread = torch.cat([values, scales], dim=2)
    ours = mqa_logits.paged(q, misread, weights, seq_lens, table, recording.decode.logits.shape[1])
    assert not relative_error(ours, recording.decode.logits) <= LOGITS_TOLERANCE
