"""Warm-up without a GPU: which batches run, and what is told of them."""

from dataclasses import replace

import pytest
import torch

from indexer_service.kernels import indexer, topk
from indexer_service.kernels.geometry import Geometry
from indexer_service.kernels.topk.plan import LENGTHS
from indexer_service.kernels.warm_up import warm_up

CPU = torch.device("cpu")
GEOMETRY = Geometry(
    heads=4, max_context=100, max_decode_rows=6, max_prefill_rows=5, head_dim=32, page=16, k=7,
    next_n=(1, 2), replica=CPU,
)  # fmt: skip


def test_progress_is_told_before_each_batch() -> None:
    told: list[tuple[int, int, str]] = []
    report = warm_up(GEOMETRY, CPU, progress=lambda *batch: told.append(batch))
    assert [done for done, _, _ in told] == list(range(report.batches))
    assert {total for _, total, _ in told} == {report.batches}
    assert {what.split(",")[0] for _, _, what in told} == {
        "k_cache.insert", "k_cache.gather", "indexer.select_paged", "indexer.select_ragged",
        "topk.select", "compile in threads",
    }  # fmt: skip
    assert report.kernels == 0
    assert report.seconds > 0


def test_sizes_reach_from_one_to_the_geometrys(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    original = indexer.select_paged

    def select_paged(q, cache, weights, lengths, table, k, **options):
        seen.add((q.shape[:2], lengths.dim(), table.shape[1], options["enabled"] is None))
        return original(q, cache, weights, lengths, table, k, **options)

    monkeypatch.setattr(indexer, "select_paged", select_paged)
    warm_up(GEOMETRY, CPU)
    assert {shape[0] for shape, *_ in seen if shape[1] == 1} == {1, 2, 4, 6}
    assert {shape[0] for shape, *_ in seen if shape[1] == 2} == {1, 2, 3}
    assert {dimensions for _, dimensions, _, _ in seen} == {1, 2}
    assert {columns for _, _, columns, _ in seen} == {1, 4, 7}
    assert {without for *_, without in seen} == {True, False}


def test_scores_reach_from_one_to_the_longest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    original = topk.select

    def select(scores, *arguments, **options):
        widths.append(scores.shape[1])
        return original(scores, *arguments, **options)

    monkeypatch.setattr(topk, "select", select)
    warm_up(GEOMETRY, CPU)
    assert {1, 16, 100, *LENGTHS} <= set(widths)


def test_a_replica_is_where_the_geometry_says() -> None:
    with pytest.raises(ValueError, match=r"^replica: on meta, k_cache on cpu"):
        warm_up(replace(GEOMETRY, replica=torch.device("meta")), CPU)
