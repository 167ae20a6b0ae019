"""Decode steps as graphs: one launch each, by the size of the batch."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.executor import DeviceLost
from indexer_service.step_kernels import LaunchShape
from ipc_handoff.layout import HandoffGeometry

logger = logging.getLogger(__name__)


class GraphKey(NamedTuple):
    """requests: of the bucket."""

    requests: int
    rows_per_decode: int
    slot: int


Capture = Callable[[GraphKey], Callable[[], None]]
"""Makes a key's graph; what it returns launches it."""


def key_of(plan: pb.StepPlan, geometry: HandoffGeometry) -> GraphKey | None:
    """The graph that answers a plan; None for steps that have none.

    A graph is for decode requests alone and for all layers. Requests of its bucket that the step
    does not have see nothing.
    """
    if plan.decode_requests != plan.requests or tuple(plan.layers) != geometry.layers:
        return None
    requests = bucket_of(plan.requests, geometry.max_requests)
    if requests * plan.rows_per_decode > geometry.max_rows:
        return None
    return GraphKey(requests, plan.rows_per_decode, geometry.staging.slot_of(plan.step))


def bucket_of(requests: int, max_requests: int) -> int:
    """The next power of two, but no more than there can be."""
    return min(1 << (requests - 1).bit_length(), max_requests)


def buckets(rows_per_decode: int, geometry: HandoffGeometry) -> list[int]:
    """All of them, ascending, that have room for their rows."""
    sizes = {bucket_of(n, geometry.max_requests) for n in range(1, geometry.max_requests + 1)}
    return sorted(size for size in sizes if size * rows_per_decode <= geometry.max_rows)


def shape_of(key: GraphKey, geometry: HandoffGeometry) -> LaunchShape:
    """The launches of a graph: for any lengths."""
    return LaunchShape(
        slot=key.slot,
        decode_requests=key.requests,
        rows_per_decode=key.rows_per_decode,
        offsets=range(0, (key.requests + 1) * key.rows_per_decode, key.rows_per_decode),
        length_bounds=[geometry.max_context] * key.requests,
        columns=geometry.table_width,
        ordinals=range(len(geometry.layers)),
    )


def first_shapes(geometry: HandoffGeometry) -> list[LaunchShape]:
    """The smallest launches that have every kernel made, in the first layer: one of a decode and a
    prefill request, or one of each where both together are more than there can be.
    """
    if min(geometry.max_requests, geometry.max_rows) >= 2:
        return [_smallest(decode_requests=1, requests=2)]
    return [_smallest(decode_requests=1, requests=1), _smallest(decode_requests=0, requests=1)]


def _smallest(decode_requests: int, requests: int) -> LaunchShape:
    """One row, and one key, a request."""
    return LaunchShape(
        slot=0,
        decode_requests=decode_requests,
        rows_per_decode=1,
        offsets=range(requests + 1),
        length_bounds=[1] * requests,
        columns=1,
        ordinals=(0,),
    )


class StepGraphs:
    """The graphs of one attachment."""

    def __init__(self, geometry: HandoffGeometry) -> None:
        self._geometry = geometry
        self._graphs: dict[GraphKey, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: GraphKey) -> Callable[[], None] | None:
        """The key's graph, if it is made."""
        return self._graphs.get(key)

    def make_all(
        self, rows_per_decode: int, capture: Capture, is_stopped: Callable[[], bool]
    ) -> None:
        """For every bucket and slot, unless stopped. By one thread; another may `find`."""
        for requests in buckets(rows_per_decode, self._geometry):
            for slot in range(self._geometry.slots):
                if is_stopped():
                    return
                self._make(GraphKey(requests, rows_per_decode, slot), capture)

    def forget(self) -> None:
        """Drop all graphs, and with them what they hold of the K caches."""
        self._graphs.clear()

    def _make(self, key: GraphKey, capture: Capture) -> None:
        if key in self._graphs:
            return
        try:
            self._graphs[key] = capture(key)
        except DeviceLost:
            raise
        except Exception:
            logger.exception("no graph for %s: such steps are answered without", key)
