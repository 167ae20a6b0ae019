"""Answers that exact scores contradict, and those that they do not."""

import torch

from dsa_indexer_cli.load.answers import contradiction, exact_scores, first_difference
from tests.load.fake_gpu import FakeGpu
from tests.load.gpu_workloads import steps_with, worker


def test_what_contradicts_exact_scores_is_named() -> None:
    made = worker(FakeGpu())
    number = steps_with(made, lambda step: step.kind == 1 and step.inputs.rows > 8)
    planned = made.steps.step(number)
    check = made.run(number, planned, 1).check
    assert check is not None
    said = set()
    for row in range(planned.inputs.rows):
        scores = exact_scores(row, *check.query, made._caches[1], check.inputs)
        answer = check.answer[row]
        assert contradiction(answer, scores) == ""
        if len(scores) <= len(answer) + 1:
            continue
        worst = int(scores.argmin())
        missing, twice, beyond = answer.clone(), answer.clone(), answer.clone()
        missing[-1], twice[0], beyond[-1] = worst, answer[1], len(scores)
        said |= {contradiction(bad, scores).split()[0] for bad in (missing, twice, beyond)}
        few = torch.full_like(answer, -1)
        few[: len(answer) - 1] = answer[:-1]
        assert contradiction(few, scores).startswith("chosen -1")
    assert said == {"key", "a", "chosen"}


def test_a_better_key_that_is_not_chosen_is_found_beside_equal_ones() -> None:
    """Enough keys are near the k-th score, so that each chosen one is good enough."""
    scores = torch.ones(20)
    scores[7] = 5.0
    answer = torch.arange(8, 12, dtype=torch.int32)
    assert "key 7 is not chosen" in contradiction(answer, scores)
    answer[0] = 7
    assert contradiction(answer, scores) == ""


def test_fewer_keys_than_k_are_all_chosen() -> None:
    scores = torch.tensor([3.0, 1.0])
    assert contradiction(torch.tensor([0, 1, -1], dtype=torch.int32), scores) == ""
    assert contradiction(torch.tensor([0, 1, 1], dtype=torch.int32), scores) != ""


def test_the_first_difference_of_two_answers() -> None:
    expected = torch.arange(6, dtype=torch.int32).view(2, 3)
    assert first_difference(expected.clone(), expected) == ""
    other = expected.clone()
    other[1, 2] += 1
    assert first_difference(other, expected).startswith("rows [1]: [3, 4, 6]")
