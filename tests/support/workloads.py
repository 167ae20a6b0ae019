"""Random steps of random geometries, whose every expected row is like no other.

A stale answer (of another step, layer or row) is therefore always a wrong one. Expected
selections are computed from private keys that never moved; the shared K caches hold the same
keys elsewhere in every step, between garbage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from attention_worker.fallback import InlineSelector
from indexer_client import Source, StepInputs
from indexer_client.step import Step
from indexer_service.kernels.k_cache.layout import planes
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import SharedTensor

HEAD_DIM = 128
_LARGEST_SCALE = 0.5
# More tokens than are selected: enough choices that no two rows select the same.
_SPARE_TOKENS = 12
_SPARE_PAGES = 3


@dataclass(frozen=True)
class Shape:
    """What a geometry is made of, at most."""

    layers: tuple[int, ...] = (2, 5, 9)
    heads: int = 16
    top_k: int = 16
    page_size: int = 32
    requests: int = 4
    next_n: int = 3
    prefill_rows: int = 6
    context: int = 200
    slots: int = 4

    @classmethod
    def random(cls, seed: int) -> "Shape":
        generator = torch.Generator().manual_seed(seed)
        pick = _Picker(generator)
        count = pick.between(1, 4)
        layers = torch.randperm(61, generator=generator)[:count].sort().values.tolist()
        return cls(
            layers=tuple(layers),
            heads=pick.one_of((16, 32, 64)),
            top_k=pick.between(8, 48),
            page_size=pick.one_of((32, 64, 128)),
            requests=pick.between(1, 5),
            next_n=pick.between(1, 4),
            prefill_rows=pick.between(1, 7),
            context=pick.between(110, 300),
            slots=pick.between(1, 4),
        )

    @property
    def geometry(self) -> HandoffGeometry:
        return HandoffGeometry(
            layers=self.layers,
            heads=self.heads,
            head_dim=HEAD_DIM,
            top_k=self.top_k,
            page_size=self.page_size,
            max_rows=self.requests * max(self.next_n, self.prefill_rows),
            max_requests=self.requests,
            max_context=self.context,
            slots=self.slots,
        )


class _Picker:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def between(self, least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=self._generator))

    def one_of(self, choices: tuple[int, ...]) -> int:
        return choices[self.between(0, len(choices) - 1)]

    def maybe(self) -> bool:
        return bool(self.between(0, 1))


@dataclass(frozen=True)
class Query:
    """q: e4m3 bytes [rows, heads, head_dim]; weights: float32 [rows, heads]."""

    q: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Case:
    """One step; `queries` and `expected` by layer, in the order of asking."""

    inputs: StepInputs
    queries: Mapping[int, Query]
    expected: Mapping[int, torch.Tensor]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.queries)


class RandomSteps:
    """Steps of one geometry; the same for the same seed in every process."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self._seed = shape, seed
        self.geometry = shape.geometry
        pages = self.geometry.table_width * shape.requests
        generator = torch.Generator().manual_seed(seed)
        self._originals = {
            layer: _keys(pages, shape.page_size, generator) for layer in shape.layers
        }
        self._reference = InlineSelector(self._originals, shape.top_k)
        size = (pages + _SPARE_PAGES, shape.page_size, HEAD_DIM + 4)
        self.k_caches = {
            layer: SharedTensor.allocate(size, torch.uint8, f"layer{layer}")
            for layer in shape.layers
        }
        self.fallback = InlineSelector(
            {layer: cache.tensor for layer, cache in self.k_caches.items()}, shape.top_k
        )

    def close(self) -> None:
        for cache in self.k_caches.values():
            cache.memory.close()

    def case(self, number: int, *, all_layers: bool = True, decode_only: bool = False) -> Case:
        """The n-th step; moves the keys in the shared caches to where it wants them."""
        generator = torch.Generator().manual_seed(self._seed * 100_003 + number)
        pick = _Picker(generator)
        layers = self._layers(pick, generator, all_layers)
        rows, decodes, next_n = self._rows(pick, decode_only)
        lengths = [
            pick.between(self.shape.top_k + _SPARE_TOKENS + count, self.shape.context)
            for count in rows
        ]
        longest = max(lengths)
        unmoved = StepInputs(
            query_start=torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=self._tables(len(rows), generator),
            rows=sum(rows),
            decode_requests=decodes,
            rows_per_decode=next_n,
            max_length=pick.between(longest, self.shape.context),
            exact_seq_lens=lengths if pick.maybe() else None,
        )
        queries = {layer: self._query(unmoved.rows, generator) for layer in layers}
        expected = {}
        for layer, query in queries.items():
            expected[layer] = torch.empty(unmoved.rows, self.shape.top_k, dtype=torch.int32)
            self._reference(layer, query.q, query.weights, unmoved, expected[layer])
        table = self._moved(unmoved, generator)
        return Case(replace(unmoved, block_table=table), queries, expected)

    def _layers(
        self, pick: _Picker, generator: torch.Generator, all_layers: bool
    ) -> tuple[int, ...]:
        layers = self.shape.layers
        if all_layers:
            return layers
        order = torch.randperm(len(layers), generator=generator).tolist()
        return tuple(layers[place] for place in order[: pick.between(1, len(layers))])

    def _rows(self, pick: _Picker, decode_only: bool) -> tuple[list[int], int, int]:
        """Rows of each request, how many requests decode, and their rows."""
        requests = pick.between(1, self.shape.requests)
        decodes = requests if decode_only else pick.between(0, requests)
        next_n = pick.between(1, self.shape.next_n) if decodes else 0
        prefill = [pick.between(1, self.shape.prefill_rows) for _ in range(requests - decodes)]
        return [next_n] * decodes + prefill, decodes, next_n

    def _tables(self, requests: int, generator: torch.Generator) -> torch.Tensor:
        width = self.geometry.table_width
        pages = torch.randperm(width * self.shape.requests, generator=generator)
        return pages[: requests * width].view(requests, width).to(torch.int32)

    def _query(self, rows: int, generator: torch.Generator) -> Query:
        q = torch.randn(rows, self.shape.heads, HEAD_DIM, generator=generator)
        weights = torch.randn(rows, self.shape.heads, generator=generator)
        return Query(q.to(torch.float8_e4m3fn).view(torch.uint8), weights)

    def _moved(self, unmoved: StepInputs, generator: torch.Generator) -> torch.Tensor:
        """Put every key elsewhere; what the lengths do not need is nonsense in the table."""
        caches = list(self.k_caches.values())
        places = torch.randperm(len(caches[0].tensor), generator=generator)
        places = places[: len(self._originals[self.shape.layers[0]])]
        spare = torch.ones(len(caches[0].tensor), dtype=torch.bool)
        spare[places] = False
        garbage = torch.randint(0, 256, caches[0].tensor[spare].shape, generator=generator)
        for layer, cache in self.k_caches.items():
            cache.tensor[spare] = garbage.to(torch.uint8)
            cache.tensor[places] = self._originals[layer]
        table = places.to(torch.int32)[unmoved.block_table.long()]
        needed = -(-unmoved.seq_lens // self.shape.page_size)
        unused = torch.arange(table.shape[1]) >= needed.unsqueeze(1)
        table[unused] = 2_000_000_011
        return table[:, : -(-unmoved.max_length // self.shape.page_size)]


def _keys(pages: int, page_size: int, generator: torch.Generator) -> torch.Tensor:
    """uint8 [pages, page_size, head_dim + 4]: e4m3 keys and their scales."""
    cache = torch.zeros(pages, page_size, HEAD_DIM + 4, dtype=torch.uint8)
    values, scales = planes(cache)
    keys = torch.randn(pages, page_size, HEAD_DIM, generator=generator)
    values.copy_(keys.to(torch.float8_e4m3fn).view(torch.uint8))
    factors = torch.rand(pages, page_size, 1, generator=generator) * _LARGEST_SCALE + 0.01
    scales.copy_(factors.view(torch.uint8))
    return cache


@dataclass
class Checker:
    """Runs steps and remembers what was wrong with them.

    Attributes:
        wrong: one line a wrong answer.
        sources: by step, by layer in the order of asking.
    """

    wrong: list[str] = field(default_factory=list)
    sources: list[list[Source]] = field(default_factory=list)
    _rows: set[bytes] = field(default_factory=set)

    def run(self, step: Step, case: Case) -> list[torch.Tensor]:
        """Ask for every layer of an entered step; the answers."""
        answers = []
        self.sources.append([])
        for layer, query in case.queries.items():
            out = torch.full_like(case.expected[layer], -2)
            source = step.select(layer, query.q, query.weights, out=out)
            self.check(step.number, layer, out, case, source)
            answers.append(out)
        return answers

    def check(self, number: int, layer: int, out: torch.Tensor, case: Case, source: Source) -> None:
        if len(self.sources) == 0:
            self.sources.append([])
        self.sources[-1].append(source)
        expected = case.expected[layer]
        for row in expected:
            key = row.numpy().tobytes()
            assert key not in self._rows, "two rows of the test have the same answer"
            self._rows.add(key)
        bad = (out != expected).any(dim=1).nonzero().flatten().tolist()
        if bad:
            self.wrong.append(
                f"step {number}, layer {layer}, rows {bad} from the {source.value}: "
                f"{out[bad[0]].tolist()} instead of {expected[bad[0]].tolist()}"
            )

    def assert_right(self) -> None:
        assert self.sources, "nothing was run"
        assert not self.wrong, f"{len(self.wrong)} wrong answers, first: {self.wrong[0]}"

    @property
    def last(self) -> list[Source]:
        """Where the last step's layers came from."""
        return self.sources[-1]
