"""What the demo runs: steps, and where their K caches lie."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from indexer_client import StepInputs
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import SharedTensor


@dataclass(frozen=True)
class Query:
    """q: e4m3 bytes [rows, heads, head_dim]; weights: float32 [rows, heads]."""

    q: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Case:
    """One step.

    Attributes:
        queries: by layer, in the order of asking.
        expected: by layer, int32 [rows, top_k]; computed without service or staging.
        scores: by layer, float32 [rows, tokens]; where another engine chose by scores that it
            rounds differently, a selection may differ in tokens which they cannot order.
    """

    label: str
    inputs: StepInputs
    queries: Mapping[int, Query]
    expected: Mapping[int, torch.Tensor]
    scores: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """Steps of one session.

    Attributes:
        case: the n-th step; puts its keys into the K caches.
    """

    geometry: HandoffGeometry
    k_caches: Mapping[int, SharedTensor]
    steps: int
    case: Callable[[int], Case]
