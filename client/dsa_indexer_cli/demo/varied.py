"""Decode steps that all differ, so that the answer of any other step, layer or row is wrong.

Made from the recorded step: heads permuted and weights scaled (per step and layer), lengths
shortened (per step and row), keys rotated inside their pages (per layer), pages moved in memory
(per step) with garbage left behind.
"""

from dataclasses import replace

import torch
from dsa_indexer_recordings.recording import Recording

from attention_worker.fallback import InlineSelector
from dsa_indexer_cli.demo.cases import Case, Query, Workload
from indexer_client import StepInputs
from indexer_service.kernels.k_cache.layout import planes
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import SharedTensor

_PAGE = 64
# Fewer than the shortest context, so that every row of every step really selects.
_TOP_K = 256
_SPARE_PAGES = 13
_SEED = 20_26


class VariedSteps:
    """Makes the steps, and computes what is expected from keys that never moved."""

    def __init__(self, recording: Recording, layers: int, steps: int) -> None:
        decode = recording.decode
        self._decode = decode
        pages = len(decode.k_cache)
        self._originals = {layer: _rotated(decode.k_cache, layer) for layer in range(layers)}
        self._reference = InlineSelector(self._originals, _TOP_K)
        shape = (pages + _SPARE_PAGES, *decode.k_cache.shape[1:])
        self.k_caches = {
            layer: SharedTensor.allocate(shape, torch.uint8, f"layer{layer}")
            for layer in range(layers)
        }
        self.geometry = HandoffGeometry(
            layers=tuple(range(layers)),
            heads=decode.q.shape[2],
            head_dim=decode.q.shape[3],
            top_k=_TOP_K,
            page_size=_PAGE,
            max_rows=8,
            max_requests=8,
            max_context=decode.block_table.shape[1] * _PAGE,
        )
        self._steps = steps

    def workload(self) -> Workload:
        return Workload(self.geometry, self.k_caches, self._steps, self.case)

    def case(self, number: int) -> Case:
        """The n-th step; always the same for the same n."""
        random = torch.Generator().manual_seed(_SEED + number)
        lengths = self._lengths(random)
        moved = torch.randperm(len(self.k_caches[0].tensor), generator=random)
        moved = moved[: len(self._decode.k_cache)].to(torch.int32)
        self._move_pages(moved, random)
        inputs = StepInputs(
            query_start=torch.arange(len(lengths) + 1, dtype=torch.int32),
            seq_lens=lengths,
            block_table=moved[self._decode.block_table.long()],
            rows=len(lengths),
            decode_requests=len(lengths),
            rows_per_decode=1,
            max_length=int(lengths.max()),
            exact_seq_lens=lengths.tolist(),
        )
        queries = {layer: self._query(random) for layer in self.k_caches}
        unmoved = replace(inputs, block_table=self._decode.block_table)
        expected = {}
        for layer, query in queries.items():
            expected[layer] = torch.empty(len(lengths), _TOP_K, dtype=torch.int32)
            self._reference(layer, query.q, query.weights, unmoved, expected[layer])
        return Case(f"varied {number}", inputs, queries, expected)

    def _lengths(self, random: torch.Generator) -> torch.Tensor:
        recorded = self._decode.seq_lens.flatten()
        shares = 0.6 + 0.4 * torch.rand(len(recorded), generator=random)
        lengths: torch.Tensor = (recorded * shares).to(torch.int32)
        return lengths

    def _move_pages(self, moved: torch.Tensor, random: torch.Generator) -> None:
        for layer, cache in self.k_caches.items():
            garbage = torch.randint(0, 256, cache.tensor.shape, generator=random)
            cache.tensor.copy_(garbage.to(torch.uint8))
            cache.tensor[moved.long()] = self._originals[layer]

    def _query(self, random: torch.Generator) -> Query:
        heads = torch.randperm(self._decode.q.shape[2], generator=random)
        scale = 0.5 + torch.rand(self._decode.weights.shape, generator=random)
        return Query(
            self._decode.q.squeeze(1)[:, heads].contiguous(),
            self._decode.weights[:, torch.randperm(len(heads), generator=random)] * scale,
        )


def _rotated(k_cache: torch.Tensor, by: int) -> torch.Tensor:
    """The same keys, `by` places further in each page."""
    rotated = k_cache.clone()
    for source, target in zip(planes(k_cache), planes(rotated), strict=True):
        target.copy_(source.roll(by, dims=1))
    return rotated
