"""Where everything is selected, sparse attention is vLLM's own dense attention."""

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from tests.vllm.engines import IN_PROCESS, Engine, prompts
from tests.vllm.tiny_model import TOP_K, write_model

LONGEST_ANSWER = 12
TOLERANCE = 0.06
"""Of the median: bf16 and another order of summation, through four layers of random weights."""


def test_short_prompts_get_the_log_probabilities_of_dense_attention(
    start_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("dense") / "tiny"
    write_model(folder, dense=True)
    sparse, dense = start_engine(IN_PROCESS), start_engine(IN_PROCESS, model=folder)
    short = [prompt[: TOP_K - LONGEST_ANSWER] for prompt in prompts()]
    right = dense.started().generate(short)
    found = differences(sparse.started().generate(short), right)
    assert sparse.call("facts")["backends"] == ["TRITON_MLA_SPARSE"]
    assert "TRITON_MLA_SPARSE" not in dense.call("facts")["backends"]
    sparse.forget()
    sparse.call("plant", "half")
    wrong = differences(sparse.generate(short), right)
    print(f"medians: {median(found):.3f}, with a wrong selection {median(wrong):.3f}")
    assert len(found) > 100
    assert median(found) < TOLERANCE < median(wrong) / 2


def differences(mine: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[float]:
    """Of log-probabilities of tokens that both found likely, while both had said the same."""
    found = []
    for one, two in zip(mine, other, strict=True):
        for position, (token, also) in enumerate(zip(one["tokens"], two["tokens"], strict=True)):
            first, second = one["logprobs"][position], two["logprobs"][position]
            found += [abs(first[each] - second[each]) for each in first.keys() & second.keys()]
            if token != also:
                break
    return found
