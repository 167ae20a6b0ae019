"""vLLM on a CPU: indices from this process, from a service, and from one that dies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.processes import ServiceProcess
from tests.support.waiting import eventually
from tests.vllm.engines import Engine, answers, prompts
from tests.vllm.tiny_model import INDEXED

WAIT_BOUND_SECONDS = "20"


@dataclass
class Pair:
    """The same engine twice, and what it answers without a service."""

    inline: Engine
    remote: Engine
    service: ServiceProcess
    expected: list[Any]


@pytest.fixture(
    scope="module",
    params=[
        {},
        {
            "kv_cache_dtype": "fp8_ds_mla",
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 2,
            },
        },
    ],
    ids=["bf16", "fp8_ds_mla with drafts"],
)
def pair(
    request: pytest.FixtureRequest,
    start_service: Callable[[], ServiceProcess],
    start_engine: Callable[..., Engine],
) -> Pair:
    service = start_service()
    inline = start_engine({}, **request.param)
    remote = start_engine(
        {
            "DSA_INDEXER_ADDRESS": service.address,
            "DSA_INDEXER_ON_REFUSAL": "error",
            "DSA_INDEXER_WAIT_BOUND_SECONDS": WAIT_BOUND_SECONDS,
        },
        **request.param,
    )
    expected = inline.started().generate(prompts())
    return Pair(inline, remote.started(), service, answers(expected))


def test_the_plugin_is_what_runs(pair: Pair) -> None:
    for engine in (pair.inline, pair.remote):
        facts = engine.call("facts")
        assert facts["backends"] == ["TRITON_MLA_SPARSE"]
        assert facts["indexer"] == "ServiceIndexer"
    assert pair.inline.call("statistics") == {}


def test_inline_repeats_and_reuses_what_is_cached(pair: Pair) -> None:
    pair.inline.forget()
    first = pair.inline.generate(prompts())
    assert answers(first) == pair.expected
    cached = [output["cached"] for output in first]
    assert any(cached), "no request found the beginning of another one in the cache"


def test_the_service_gives_the_same_bits(pair: Pair) -> None:
    assert answers(pair.remote.generate(prompts())) == pair.expected
    counts = pair.remote.call("statistics")
    assert counts["answered_layers"] == len(INDEXED) * counts["steps"] > 0
    assert counts["inline_layers"] == counts["faulted_rows"] == counts["rejected_steps"] == 0


def test_a_service_that_dies_within_a_step_is_not_noticed(pair: Pair) -> None:
    pair.remote.forget()
    before = pair.remote.call("statistics")
    pair.remote.call("kill_after", pair.service.pid, 5 * len(INDEXED) + 1)
    assert answers(pair.remote.generate(prompts())) == pair.expected
    after = pair.remote.call("statistics")
    assert after["answered_layers"] == before["answered_layers"] + 5 * len(INDEXED) + 1
    assert after["inline_layers"] > len(INDEXED)
    assert after["detachments"] == 1


def test_its_successor_is_taken(pair: Pair, start_service: Callable[[], ServiceProcess]) -> None:
    pair.service.wait()
    start_service()
    assert eventually(lambda: pair.remote.call("statistics")["attachments"] == 2, 60)
    pair.remote.forget()
    before = pair.remote.call("statistics")
    assert answers(pair.remote.generate(prompts())) == pair.expected
    after = pair.remote.call("statistics")
    assert after["answered_layers"] > before["answered_layers"]
    assert after["inline_layers"] == before["inline_layers"]


def test_a_selection_that_is_shifted_by_one_is_seen(pair: Pair) -> None:
    """Otherwise nothing here says anything about the selection."""
    pair.inline.forget()
    pair.inline.call("plant_shift")
    wrong = answers(pair.inline.generate(prompts()))
    differ = [mine != right for mine, right in zip(wrong, pair.expected, strict=True)]
    assert sum(differ) >= len(differ) - 1, differ
