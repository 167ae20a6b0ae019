"""Which decode steps have graphs, and of what size."""

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.step_graphs import bucket_of, buckets, key_of
from ipc_handoff.layout import HandoffGeometry

GEOMETRY = HandoffGeometry(
    layers=(3, 7), heads=16, head_dim=64, top_k=24, page_size=64, max_rows=48, max_requests=6,
    max_context=384, slots=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "most", "bucket"), [(1, 6, 1), (2, 6, 2), (3, 6, 4), (5, 6, 6), (33, 256, 64)]
)
def test_a_bucket_is_the_next_power_of_two(requests: int, most: int, bucket: int) -> None:
    assert bucket_of(requests, most) == bucket


def _plan(**fields: Any) -> pb.StepPlan:
    wanted = {
        "step": 7, "rows": 3, "requests": 3, "decode_requests": 3, "rows_per_decode": 1,
        "layers": (3, 7),
    }  # fmt: skip
    return pb.StepPlan(**(wanted | fields))


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, (4, 1, 1)),
        ({"step": 8, "rows_per_decode": 8}, (4, 8, 2)),
        ({"requests": 5, "decode_requests": 5, "rows_per_decode": 8}, (6, 8, 1)),
        ({"decode_requests": 2}, None),
        ({"layers": (3,)}, None),
        ({"layers": (7, 3)}, None),
    ],
)
def test_decode_steps_of_all_layers_have_graphs(
    fields: dict[str, Any], key: tuple[int, int, int] | None
) -> None:
    assert key_of(_plan(**fields), GEOMETRY) == key


def test_a_bucket_has_room_for_its_rows() -> None:
    assert buckets(8, GEOMETRY) == [1, 2, 4, 6]
    narrow = HandoffGeometry(
        layers=(3, 7), heads=16, head_dim=64, top_k=24, page_size=64, max_rows=5, max_requests=5,
        max_context=384,
    )  # fmt: skip
    assert buckets(1, narrow) == [1, 2, 4, 5]
    assert buckets(2, narrow) == [1, 2]
    assert key_of(_plan(rows_per_decode=2), narrow) is None
