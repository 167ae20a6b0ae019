"""vLLM on a CPU in several workers: each has a session of its own, and all select the same."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.processes import ServiceProcess
from tests.vllm.engines import Engine, answers, prompts
from tests.vllm.test_engine import WAIT_BOUND_SECONDS

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Way:
    """Attributes:
    options: of the engine, which has two workers.
    environment: of vLLM.
    indexed: layers with an indexer, by rank.
    """

    options: dict[str, Any]
    environment: dict[str, str]
    indexed: tuple[int, int]


TENSOR = Way(
    # Layers 2 and 3 share what layer 1 selects.
    {"tensor_parallel_size": 2, "hf_overrides": {"index_topk_pattern": "FFSS"}},
    {},
    (2, 2),
)
PIPELINE = Way({"pipeline_parallel_size": 2}, {"VLLM_PP_LAYER_PARTITION": "1,3"}, (1, 2))


@dataclass
class Pair:
    """The same engine twice, and what it answers without a service."""

    way: Way
    inline: Engine
    remote: Engine
    service: ServiceProcess
    expected: list[Any]


@pytest.fixture(scope="module", params=[TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def pair(
    request: pytest.FixtureRequest,
    start_service: Callable[[], ServiceProcess],
    start_engine: Callable[..., Engine],
) -> Iterator[Pair]:
    way: Way = request.param
    service = start_service()
    inline = start_engine(way.environment, **way.options)
    remote = start_engine(
        {
            **way.environment,
            "DSA_INDEXER_ADDRESS": service.address,
            "DSA_INDEXER_ON_REFUSAL": "error",
            "DSA_INDEXER_WAIT_BOUND_SECONDS": WAIT_BOUND_SECONDS,
        },
        **way.options,
    )
    expected = answers(inline.started().generate(prompts()))
    yield Pair(way, inline, remote.started(), service, expected)
    inline.close()
    remote.close()


def test_the_service_gives_the_same_bits_to_every_worker(pair: Pair) -> None:
    assert answers(pair.remote.generate(prompts())) == pair.expected
    for counts, indexed in zip(pair.remote.call_all("statistics"), pair.way.indexed, strict=True):
        assert counts["answered_layers"] == indexed * counts["steps"] > 0
        assert counts["inline_layers"] == counts["faulted_rows"] == 0


def test_ranks_select_the_same(pair: Pair) -> None:
    """Of a tensor-parallel group, whose ranks select the same tokens each for itself."""
    if pair.way is not TENSOR:
        pytest.skip("stages have different layers")
    for engine in (pair.inline, pair.remote):
        engine.forget()
        engine.call_all("watch_selections")
        assert answers(engine.generate(prompts())) == pair.expected
    told = {each for engine in (pair.inline, pair.remote) for each in engine.call_all("selections")}
    assert len(told) == 1


def test_a_service_that_is_gone_is_not_noticed(pair: Pair) -> None:
    pair.remote.forget()
    pair.service.kill()
    assert answers(pair.remote.generate(prompts())) == pair.expected
    for counts in pair.remote.call_all("statistics"):
        assert counts["detachments"] == 1
        assert counts["inline_layers"] > 0


def test_steps_of_a_pipeline_overlap_without_an_event(pair: Pair) -> None:
    """What vLLM's pinned buffers need a guard for, on a GPU: see `plugin/pinned_buffers.py`."""
    overlapping = pair.way.options.get("pipeline_parallel_size", 1)
    for facts in pair.inline.call_all("facts"):
        assert facts["overlapping_steps"] == overlapping
        assert not facts["waits_for_copies"]


def test_a_stage_without_its_first_indices_does_not_start(
    start_engine: Callable[..., Engine],
) -> None:
    """Layer 2 shares layer 1's, which vLLM's own partition puts into the stage before."""
    with pytest.raises(AssertionError, match=r"a stage begins with layer 2, .*LAYER_PARTITION"):
        start_engine({}, pipeline_parallel_size=2).started()
