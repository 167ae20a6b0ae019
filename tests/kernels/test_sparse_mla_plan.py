"""How sparse_mla chooses kernels, blocks and splits: no GPU, no Triton."""

from typing import Any

import pytest

from attention_worker.kernels.sparse_mla import plan
from attention_worker.kernels.sparse_mla.plan import Plan

TOKENS = [1, 2, 3, 7, 8, 33, 64, 100, 132, 133, 264, 265, 4096]
HEADS = [1, 8, 16, 17, 32, 33, 64, 100, 128]


def choose(tokens: int, heads: int, k: int = 2048, **changes: Any) -> Plan:
    usual = {"arch": 90, "processors": 132, "fp8": False, "aligned": True, "splits": None}
    return plan.choose(tokens, heads, k, **{**usual, "invariant": False, **changes})


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("k", [1, 64, 65, 1000, 2048, 4096])
def test_splits_cover_every_slot_and_none_is_empty(arch: int, fp8: bool, k: int) -> None:
    for tokens in TOKENS:
        for heads in HEADS:
            for asked in (None, 1, 3, 1000):
                chosen = choose(tokens, heads, k, arch=arch, fp8=fp8, splits=asked)
                assert chosen.per_split % chosen.block_tokens == 0
                assert (chosen.splits - 1) * chosen.per_split < k
                assert chosen.splits * chosen.per_split >= k
                assert chosen.splits <= min(plan.LONGEST_SPLITS, asked or plan.LONGEST_SPLITS)


@pytest.mark.parametrize("arch", [80, 90, 120])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_batch_invariant_splits_know_no_batch(arch: int, fp8: bool, heads: int) -> None:
    plans = [choose(tokens, heads, arch=arch, fp8=fp8, invariant=True) for tokens in TOKENS]
    same_bits = {"spread": "wide"}
    assert len({
        (same_bits.get(p.form, p.form), p.block_heads, p.block_tokens, p.warps, p.splits,
         p.per_split)
        for p in plans
    }) == 1  # fmt: skip


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_programs_of_several_splits_follow_the_batch(fp8: bool, heads: int) -> None:
    programs = []
    for tokens in TOKENS:
        chosen = choose(tokens, heads, fp8=fp8, invariant=True)
        assert 1 <= chosen.per_program <= chosen.splits
        assert not chosen.fold or chosen.per_program == chosen.splits
        programs.append(chosen.per_program)
        assert choose(tokens, heads, fp8=fp8).per_program == 1
    assert programs == sorted(programs)
    assert programs[0] == 1
    assert programs[-1] == chosen.splits


@pytest.mark.parametrize("tokens", [1, 131, 132, 500, 972, 973, 4096])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("invariant", [False, True])
def test_turns_fit_the_workspace_and_are_alike(tokens: int, heads: int, invariant: bool) -> None:
    chosen = choose(tokens, heads, splits=4, invariant=invariant)
    turn = plan.turns(chosen, tokens, heads, 132)
    assert turn >= 1
    if not chosen.fold:
        assert chosen.splits * heads * (2 * 512 + 4) * min(turn, tokens) <= plan.WORKSPACE_BYTES
        least = -(-tokens * chosen.splits * heads * 1028 // plan.WORKSPACE_BYTES)
        assert -(-tokens // turn) <= least + 1


def test_few_heads_are_not_padded_to_64_and_few_tokens_are_split() -> None:
    assert choose(64, 16).block_heads == 16
    assert choose(64, 128).block_heads == 64
    assert choose(1, 16).splits == 32
    assert choose(512, 16).splits == 1


def test_few_batch_invariant_tokens_of_many_heads_are_spread_over_the_gpu() -> None:
    forms = [choose(tokens, 64, invariant=True).form for tokens in (1, 8, 9, 512)]
    assert forms == ["spread", "spread", "wide", "wide"]
    assert choose(1, 64).form == "narrow"
    assert choose(1, 64, fp8=True, invariant=True).form == "fp8"
    for k in (1, 64, 200, 2048, 4096):
        chosen = choose(1, 128, k, invariant=True)
        assert 1 <= chosen.buffers <= chosen.per_split // chosen.block_tokens
        assert chosen.per_program == 1


def test_what_sm90_cannot_align_falls_back_to_the_portable_kernel() -> None:
    assert choose(8, 64, aligned=False).form == "portable"
    assert choose(8, 64, fp8=True, aligned=False).form == "portable"


@pytest.mark.parametrize(
    ("value", "means"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_batch_invariance_follows_vllm(
    value: str | None, means: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv(plan.INVARIANT, raising=False)
    else:
        monkeypatch.setenv(plan.INVARIANT, value)
    assert plan.batch_invariant(None) is means
    assert plan.batch_invariant(True)
    assert not plan.batch_invariant(False)
