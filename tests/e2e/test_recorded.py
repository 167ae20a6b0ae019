"""Data recorded inside vLLM through each way of asking: the same bytes, and vLLM's own answer."""

from collections.abc import Callable, Iterator

import pytest
import torch

from attention_worker.fallback import InlineSelector
from attention_worker.kernels import sparse_mla
from dsa_indexer_cli.demo.cases import Case, Workload
from dsa_indexer_cli.demo.compare import indistinguishable_rows, same_rows
from dsa_indexer_cli.demo.recorded import DECODE_LAYER, PREFILL_LAYER, recorded_workload
from indexer_client import ClientSettings, Session, Source
from tests.data import recording
from tests.e2e.conftest import Start
from tests.support.waiting import SOON

ATTENTION_TOLERANCE = 4e-3
WAYS = ("unary", "stream", "ring")


@pytest.fixture
def workload() -> Iterator[Workload]:
    made = recorded_workload(recording.load())
    yield made
    for cache in made.k_caches.values():
        cache.memory.close()


@pytest.fixture
def select(
    start: Start, client_settings: ClientSettings, workload: Workload
) -> Callable[[str, Case], torch.Tensor]:
    """Has a recorded step answered, by the way of asking."""
    start()

    def select(way: str, case: Case) -> torch.Tensor:
        signalling = "ring" if way == "unary" else way
        settings = client_settings.model_copy(update={"signalling": signalling})
        with Session(workload.geometry, workload.k_caches, refuse, settings=settings) as session:
            session.wait_attached(SOON)
            (layer,) = case.queries
            query = case.queries[layer]
            out = torch.full_like(case.expected[layer], -2)
            if way == "unary":
                session.select_once(layer, query.q, query.weights, case.inputs, out=out)
            else:
                with session.step(case.inputs, [layer]) as step:
                    source = step.select(layer, query.q, query.weights, out=out)
                assert source is Source.SERVICE
        return out

    return select


def refuse(*_: object) -> None:
    raise AssertionError("the service must answer")


def test_all_ways_of_asking_give_the_same_bytes(
    select: Callable[[str, Case], torch.Tensor], workload: Workload
) -> None:
    for number in range(workload.steps):
        case = workload.case(number)
        unary, stream, ring = (select(way, case) for way in WAYS)
        assert torch.equal(unary, stream), case.label
        assert torch.equal(unary, ring), case.label


@pytest.mark.parametrize("way", WAYS)
def test_the_decode_selection_is_vllms(
    way: str, select: Callable[[str, Case], torch.Tensor], workload: Workload
) -> None:
    case = workload.case(0)
    out = select(way, case)
    for row, theirs in zip(out, recording.load().attention.topk_indices, strict=True):
        assert set(row.tolist()) == set(theirs.tolist())


@pytest.mark.parametrize("way", WAYS)
def test_the_prefill_selection_follows_vllms_scores(
    way: str, select: Callable[[str, Case], torch.Tensor], workload: Workload
) -> None:
    """Up to one row whose last choice the recorded engine's rounding cannot order."""
    case = workload.case(1)
    out, expected = select(way, case), case.expected[PREFILL_LAYER]
    same = same_rows(out, expected)
    alike = indistinguishable_rows(out, expected, case.scores[PREFILL_LAYER])
    assert bool((same | alike).all())
    assert int((~same).sum()) <= 1


@pytest.mark.parametrize("way", WAYS)
def test_attention_over_the_selection_is_flashmlas(
    way: str, select: Callable[[str, Case], torch.Tensor], workload: Workload
) -> None:
    indices = select(way, workload.case(0))
    attention = recording.load().attention
    slots = sparse_mla.to_slots(
        indices,
        torch.arange(len(indices), dtype=torch.int32),
        attention.block_table,
        attention.kv_cache.shape[1],
    )
    found = sparse_mla.attend(attention.q, attention.kv_cache, slots, attention.scale)
    assert isinstance(found, torch.Tensor)
    wanted = attention.out.double()
    assert float((found.double() - wanted).norm() / wanted.norm()) <= ATTENTION_TOLERANCE


def test_inline_and_service_select_the_same_bytes(
    select: Callable[[str, Case], torch.Tensor], workload: Workload
) -> None:
    caches = {layer: cache.tensor for layer, cache in workload.k_caches.items()}
    inline = InlineSelector(caches, workload.geometry.top_k)
    for number, layer in enumerate((DECODE_LAYER, PREFILL_LAYER)):
        case = workload.case(number)
        query, out = case.queries[layer], torch.empty_like(case.expected[layer])
        inline(layer, query.q, query.weights, case.inputs, out)
        assert torch.equal(out, select("ring", case))
