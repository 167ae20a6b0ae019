"""indexer.select_*: windows change memory and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from indexer_service.kernels import indexer, mqa_logits, topk
from indexer_service.kernels.indexer import composed
from indexer_service.kernels.indexer.windows import plan_windows
from indexer_service.kernels.nan_seen import NanSeen, row_of
from tests.kernels import inputs

NAN_CODE = 0x7F
BUDGETS = [1, 5_000, 30_000, 200_000, 1 << 30]
"""From less than one page of one row to everything at once."""


class LargestAllocation(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = func.is_view or func._schema.is_mutable
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not views:
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return result


@pytest.mark.parametrize("workspace", BUDGETS)
@pytest.mark.parametrize("next_n", [1, 2])
def test_paged_windows_select_the_same_bits(workspace: int, next_n: int) -> None:
    case = inputs.paged([700, 0, 33, 512, 1], next_n=next_n)
    expected = topk.select(mqa_logits.paged(*case.tensors, 700), 40)
    ours = indexer.select_paged(*case.tensors, 40, workspace=workspace)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("workspace", BUDGETS)
def test_ragged_windows_select_the_same_bits(workspace: int) -> None:
    bounds = [(0, 700), (100, 650), (650, 700), (20, 10), (0, 3), (699, 700)]
    case = inputs.ragged(bounds, 700)
    scores = mqa_logits.ragged(*case.tensors)
    expected = topk.select(scores, 40, case.row_start, case.row_end)
    ours = indexer.select_ragged(*case.tensors, 40, workspace=workspace)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("workspace", BUDGETS)
def test_ties_across_windows_go_to_the_lowest_index(workspace: int) -> None:
    case = inputs.ragged([(0, 640), (7, 640)], 640)
    case.k[:] = case.k[:64].repeat(10, 1)  # every score comes ten times, in every window
    case.k_scale.fill_(1.0)
    scores = mqa_logits.ragged(*case.tensors)
    expected = topk.select(scores, 100, case.row_start, case.row_end)
    assert torch.equal(indexer.select_ragged(*case.tensors, 100, workspace=workspace), expected)


@pytest.mark.parametrize("workspace", BUDGETS)
def test_nan_and_infinite_scores_across_windows(workspace: int) -> None:
    case = inputs.ragged([(0, 640)], 640)
    case.weights.abs_()
    case.k_scale[::7] = torch.nan
    case.k_scale[5::50] = torch.inf
    case.k_scale[100:300] = -torch.inf
    expected = topk.select(mqa_logits.ragged(*case.tensors), 600)
    assert (expected == -1).any()
    assert torch.equal(indexer.select_ragged(*case.tensors, 600, workspace=workspace), expected)


def test_k_above_the_context_gives_every_key() -> None:
    case = inputs.paged([5, 70])
    ours = indexer.select_paged(*case.tensors, 100, workspace=1)
    assert ours[0].tolist() == [*range(5), *[-1] * 95]
    assert ours[1].tolist() == [*range(70), *[-1] * 30]


@pytest.mark.parametrize("workspace", [1 << 20, 2 << 20, 8 << 20])
def test_no_temporary_is_larger_than_the_workspace(workspace: int) -> None:
    paged = inputs.paged([40_000] * 4, heads=2, dim=16, page=64)
    ragged = inputs.ragged([(0, 40_000)] * 4, 40_000, heads=2, dim=16)
    with LargestAllocation() as largest:
        indexer.select_paged(*paged.tensors, 2048, workspace=workspace)
        indexer.select_ragged(*ragged.tensors, 2048, workspace=workspace)
    assert workspace / 16 < largest.bytes <= workspace


def test_rows_are_cut_before_keys() -> None:
    plan = plan_windows(100, 1, 10_000, 100, 4 << 20, step=64)
    assert plan.keys == 10_000
    assert 1 < plan.units < 100


def test_enabled_zero_writes_nothing_and_calls_nothing() -> None:
    case = inputs.paged([50])
    out = torch.full((1, 8), 77, dtype=torch.int32)
    stages: list[str] = []
    off, on = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    indexer.select_paged(*case.tensors, 8, out=out, enabled=off, on_stage=stages.append)
    assert (out == 77).all()
    assert stages == []
    indexer.select_paged(*case.tensors, 8, out=out, enabled=on, on_stage=stages.append)
    assert torch.equal(out, indexer.select_paged(*case.tensors, 8))
    assert stages == ["logits", "topk"]


def test_enabled_zero_writes_nothing_for_ragged_rows() -> None:
    case = inputs.ragged([(0, 50)], 50)
    out = torch.full((1, 8), 77, dtype=torch.int32)
    indexer.select_ragged(*case.tensors, 8, out=out, enabled=torch.zeros(1, dtype=torch.int32))
    assert (out == 77).all()


@pytest.mark.parametrize("word", [0, 1])
def test_an_answer_made_out_of_sight_is_handed_over_by_the_word(word: int) -> None:
    """What windows of keys do on a GPU, where the host does not know the word."""
    out = torch.full((2, 3), 77, dtype=torch.int32)
    answer = torch.arange(6, dtype=torch.int32).view(2, 3)
    composed._hand_over(answer, torch.tensor([word], dtype=torch.int32), out)
    assert torch.equal(out, answer) if word else (out == 77).all()


def test_stages_are_told_once_a_window_in_order() -> None:
    stages: list[str] = []
    case = inputs.paged([64], page=16)
    indexer.select_paged(*case.tensors, 8, workspace=1, on_stage=stages.append)
    assert stages == ["logits", "topk"] * 4


@pytest.mark.parametrize("abandon_at", [1, 2, 5])
def test_what_on_stage_raises_abandons_the_selection(abandon_at: int) -> None:
    seen = 0

    def on_stage(stage: str) -> None:
        nonlocal seen
        seen += 1
        if seen == abandon_at:
            raise TimeoutError(stage)

    case = inputs.paged([64], page=16)
    with pytest.raises(TimeoutError):
        indexer.select_paged(*case.tensors, 8, workspace=1, on_stage=on_stage)
    assert seen == abandon_at


@pytest.mark.parametrize("workspace", BUDGETS)
def test_output_view_within_larger_rows_is_written_whole(workspace: int) -> None:
    case = inputs.paged([40, 0, 90])
    expected = indexer.select_paged(*case.tensors, 50)
    out, larger = inputs.inside_larger_rows(expected, 77)
    indexer.select_paged(*case.tensors, 50, out=out, workspace=workspace)
    assert torch.equal(out, expected)
    assert (larger[:, :2] == 77).all()
    assert (larger[:, -3:] == 77).all()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("k", {"k": 0}),
        ("out", {"out": torch.zeros((2, 7), dtype=torch.int32)}),
        ("workspace", {"workspace": -1}),
        ("workspace", {"workspace": 0}),
        ("enabled", {"enabled": torch.zeros(2, dtype=torch.int32)}),
        ("seq_lens", {"seq_lens": torch.zeros((2, 3), dtype=torch.int32)}),
        ("impl", {"impl": "deepgemm"}),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(name: str, arguments: dict[str, Any]) -> None:
    good = {**vars(inputs.paged([20, 10])), "k": 8}
    with pytest.raises(ValueError, match=rf"^{name}: .* \(fix: .+\)$"):
        indexer.select_paged(**{**good, **arguments})


@pytest.mark.parametrize("workspace", BUDGETS)
def test_rows_whose_scores_hold_nan_are_marked_and_no_other(workspace: int) -> None:
    case = inputs.paged([700, 0, 33, 512], next_n=2)
    case.q.view(torch.uint8)[2, 1, 0, 0] = NAN_CODE
    scales = case.k_cache.view(len(case.k_cache), -1)[:, -4 * case.k_cache.shape[1] :]
    page, place = int(case.block_table[3, 5]), 7
    scales.view(torch.float32)[page, place] = torch.nan
    # Behind a request's last token stands what nobody has written: it is not looked at.
    beyond = int(case.block_table[2, 33 // case.k_cache.shape[1]])
    scales.view(torch.float32)[beyond, 33 % case.k_cache.shape[1]] = torch.nan
    marked = torch.zeros(8, dtype=torch.bool)
    indexer.select_paged(*case.tensors, 40, workspace=workspace, nan_rows=marked)
    assert marked.nonzero().flatten().tolist() == [5, 6, 7]


def test_ragged_rows_with_nan_are_marked() -> None:
    case = inputs.ragged([(0, 300), (300, 600), (600, 700)], 700)
    case.k_scale[450] = torch.nan
    marked = torch.zeros(3, dtype=torch.bool)
    indexer.select_ragged(*case.tensors, 40, workspace=30_000, nan_rows=marked)
    assert marked.tolist() == [False, True, False]


@pytest.mark.parametrize("workspace", BUDGETS)
@pytest.mark.parametrize("first", [0, 7], ids=["of the step", "behind other rows"])
def test_the_first_row_with_nan_is_noted_in_whichever_window_it_is(
    workspace: int, first: int
) -> None:
    paged = inputs.paged([700, 0, 33, 512], next_n=2)
    paged.q.view(torch.uint8)[2:, 0, 0, 0] = NAN_CODE
    ragged = inputs.ragged([(0, 300), (300, 600), (600, 700), (400, 500)], 700)
    ragged.k_scale[450] = torch.nan
    asked: list[tuple[Callable[..., torch.Tensor], Any, int]] = [
        (indexer.select_paged, paged, 4),
        (indexer.select_ragged, ragged, 1),
    ]
    for select, case, row in asked:
        word = torch.zeros(1, dtype=torch.int32)
        select(*case.tensors, 40, workspace=workspace, nan=NanSeen(word, first))
        assert row_of(int(word)) == first + row


def test_of_a_selection_that_is_not_enabled_no_nan_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it is made out of sight, as on a GPU, from whatever is in memory."""
    monkeypatch.setattr(composed, "_private", lambda enabled, out: torch.empty_like(out))
    case = inputs.paged([64])
    case.q.view(torch.uint8)[0, 0, 0, 0] = NAN_CODE
    for is_enabled, row in ((0, None), (1, 0)):
        enabled, word = (
            torch.tensor([is_enabled], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
        )
        indexer.select_paged(*case.tensors, 4, enabled=enabled, nan=NanSeen(word))
        assert row_of(int(word)) == row


def test_marks_that_do_not_fit_are_refused() -> None:
    case = inputs.paged([64])
    with pytest.raises(ValueError, match=r"^nan_rows: "):
        indexer.select_paged(*case.tensors, 4, nan_rows=torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^nan_rows: "):
        indexer.select_paged(*case.tensors, 4, nan_rows=torch.zeros(1))
