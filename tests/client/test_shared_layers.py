"""What sits between the indexer and attention elsewhere: layers that share, tables cut short.

The kernels' part of these reports is in tests/kernels/peer_faults.py.
"""

from pathlib import Path

import pytest
import torch

from indexer_client import Source
from ipc_handoff.layout import HandoffGeometry
from tests.support.plants import Pair, pair
from tests.support.workloads import Shape

# IndexShare: F has an indexer, S attends to what the F before it selected.
PATTERN = "FSSSFSSS"
OWN = tuple(layer for layer, kind in enumerate(PATTERN) if kind == "F")


def one_forward(running: Pair) -> list[torch.Tensor]:
    """What each layer of the pattern attends to, from the one buffer that they all read."""
    case = running.case(decode_only=True)
    buffer = torch.full_like(case.expected[OWN[0]], -2)
    attended = []
    with running.session.step(case.inputs, case.layers) as step:
        for layer in range(len(PATTERN)):
            if layer in OWN:
                query = case.queries[layer]
                assert step.select(layer, query.q, query.weights, out=buffer) is Source.SERVICE
                running.checker.check(step.number, layer, buffer, case, Source.SERVICE)
            attended.append(buffer.clone())
    return attended


def test_shared_layers_attend_to_what_this_forward_selected(tmp_path: Path) -> None:
    """ATOM/1260, ik_llama.cpp/2063, Megatron/6020, S/33197: the last forward's was used."""
    with pair(tmp_path, shape=Shape(layers=OWN)) as running:
        first, second = one_forward(running), one_forward(running)
        running.checker.assert_right()
    for attended in (first, second):
        for layer, selection in enumerate(attended):
            owner = max(own for own in OWN if own <= layer)
            assert torch.equal(selection, attended[owner])
        assert not torch.equal(attended[OWN[0]], attended[OWN[1]])
    assert first[1].shape != second[1].shape or not torch.equal(first[1], second[1])


@pytest.mark.parametrize("wrong", [1, OWN[1]], ids=["a shared layer", "the next owner"])
def test_a_layer_out_of_turn_is_an_error_not_an_old_answer(wrong: int, tmp_path: Path) -> None:
    with pair(tmp_path, shape=Shape(layers=OWN)) as running:
        one_forward(running)  # so that there is an answer of the last forward to leak
        case = running.case()
        query = case.queries[OWN[0]]
        out = torch.full_like(case.expected[OWN[0]], -2)
        with running.session.step(case.inputs, case.layers) as step:
            with pytest.raises(ValueError, match=f"^layer: {wrong}, "):
                step.select(wrong, query.q, query.weights, out=out)
            assert (out == -2).all()
            running.checker.run(step, case)
        running.checker.assert_right()


def test_the_last_tokens_of_a_rank_that_has_half_of_a_context(tmp_path: Path) -> None:
    """V/46514: with DCP = 2 one formula sized the table and another filled it.

    131 tokens, of which a rank has 66: two pages of 32 and two tokens more.
    """
    shape = Shape(top_k=53, context=66, next_n=1, prefill_rows=1)
    assert shape.geometry.table_width == shape.geometry.columns(66) == 3
    with pair(tmp_path, shape=shape) as running:
        case = running.case()
        assert case.inputs.block_table.shape[1] == 3
        assert (case.inputs.seq_lens == 66).all()
        with running.session.step(case.inputs, case.layers) as step:
            running.checker.run(step, case)
        running.checker.assert_right()
        assert running.session.statistics.faulted_rows == 0


@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_a_table_reaches_the_context_whatever_its_last_page_holds(page_size: int) -> None:
    for context in range(1, 4 * page_size + 2):
        geometry = HandoffGeometry(
            layers=(0,), heads=1, head_dim=128, top_k=1, page_size=page_size, max_rows=1,
            max_requests=1, max_context=context,
        )  # fmt: skip
        last = context - 1
        assert last // page_size == geometry.table_width - 1
