"""Where every byte lies."""

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff import layout
from ipc_handoff.layout import CACHE_LINE, MESSAGE_BYTES, REPORTED_FAULTS, Area, HandoffGeometry
from ipc_handoff.stages import SERVICE_STAGES
from tests.ipc_handoff.properties import unhurried
from tests.ipc_handoff.support import GEOMETRY

# Change it together with LAYOUT_VERSION only.
GOLDEN_VERSION = 5
GOLDEN_FINGERPRINT = 0xA1031DFC91CEB515

geometries = st.builds(
    HandoffGeometry,
    layers=st.lists(st.integers(0, 200), min_size=1, max_size=80, unique=True).map(
        lambda ids: tuple(sorted(ids))
    ),
    heads=st.sampled_from([16, 32, 64, 128]),
    head_dim=st.just(128),
    top_k=st.integers(1, 4096),
    page_size=st.sampled_from([32, 64, 128]),
    max_rows=st.integers(1, 500),
    max_requests=st.integers(1, 300),
    max_context=st.integers(1, 200_000),
    slots=st.integers(1, 6),
)


def overlap(areas: list[Area]) -> list[tuple[str, str]]:
    pairs = itertools.combinations(areas, 2)
    return [(a.name, b.name) for a, b in pairs if a.offset < b.end and b.offset < a.end]


@unhurried
@given(geometries)
def test_areas_are_apart_on_cache_lines_and_inside(geometry: HandoffGeometry) -> None:
    for areas, size in (
        (geometry.control.areas, geometry.control.size),
        (geometry.staging.areas, geometry.staging.slot_size),
        (geometry.answers.areas, geometry.answers.slot_size),
    ):
        listed = list(areas.values())
        assert overlap(listed) == []
        assert all(area.offset % CACHE_LINE == 0 and area.size % CACHE_LINE == 0 for area in listed)
        assert max(area.end for area in listed) <= size
    g = geometry
    assert g.staging.areas["q"].size >= g.max_rows * g.heads * g.head_dim
    assert g.staging.areas["weights"].size >= g.max_rows * g.heads * 4
    assert g.staging.areas["query_start"].size >= (g.max_requests + 1) * 4
    assert g.staging.areas["seq_lens"].size >= g.max_requests * 4
    assert g.staging.areas["block_table"].size >= g.max_requests * g.table_width * 4
    assert g.answers.areas["indices"].size >= g.max_rows * g.top_k * 4
    assert g.table_width * g.page_size >= g.max_context > (g.table_width - 1) * g.page_size


def test_planted_overlap_is_seen() -> None:
    areas = list(GEOMETRY.control.areas.values())
    moved = replace(areas[3], offset=areas[3].offset - CACHE_LINE)
    assert overlap([*areas[:3], moved, *areas[4:]]) != []


def test_steps_in_flight_have_slots_of_their_own() -> None:
    for first in range(20):
        steps = range(first, first + GEOMETRY.slots)
        assert len({GEOMETRY.staging.slot_of(step) for step in steps}) == GEOMETRY.slots
        assert len({GEOMETRY.answers.slot_of(step) for step in steps}) == GEOMETRY.slots


# Values that differ so little that every area stays where it is.
CHANGES: dict[str, Any] = {
    "layers": (0, 2, 6),
    "heads": 32,
    "head_dim": 64,
    "top_k": 63,
    "page_size": 63,
    "max_rows": 9,
    "max_requests": 5,
    "max_context": 1001,
    "slots": 4,
}


@pytest.mark.parametrize("field", [field.name for field in fields(HandoffGeometry)])
def test_fingerprint_changes_with(field: str) -> None:
    changed = replace(GEOMETRY, **{field: CHANGES[field]})
    assert changed.fingerprint != GEOMETRY.fingerprint


def test_fingerprint_tells_row_strides_apart_that_fill_the_same_areas() -> None:
    base = replace(GEOMETRY, max_rows=2, top_k=2048)
    other = replace(base, top_k=2047)
    assert base.answers.areas == other.answers.areas
    assert base.fingerprint != other.fingerprint


@unhurried
@given(geometries, geometries)
def test_fingerprints_are_equal_only_for_equal_geometries(
    one: HandoffGeometry, other: HandoffGeometry
) -> None:
    assert (one.fingerprint == other.fingerprint) == (one == other)
    assert 0 <= one.fingerprint < 2**64


@pytest.mark.parametrize(
    ("constant", "value"),
    [
        ("LAYOUT_VERSION", layout.LAYOUT_VERSION + 1),
        ("RING_CAPACITY", layout.RING_CAPACITY * 2),
        ("STAMPED_STEPS", layout.STAMPED_STEPS * 2),
        ("MESSAGE_BYTES", layout.MESSAGE_BYTES * 2),
        ("REPORTED_FAULTS", layout.REPORTED_FAULTS * 2),
        ("SERVICE_STAGES", tuple(reversed(SERVICE_STAGES))),
    ],
)
def test_fingerprint_changes_with_constant(
    constant: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = GEOMETRY.fingerprint
    monkeypatch.setattr(layout, constant, value)
    assert replace(GEOMETRY).fingerprint != before


def test_fingerprint_of_one_geometry_is_pinned_to_the_layout_version() -> None:
    assert (layout.LAYOUT_VERSION, GEOMETRY.fingerprint) == (GOLDEN_VERSION, GOLDEN_FINGERPRINT), (
        f"the layout of shared bytes changed: bump ipc_handoff.layout.LAYOUT_VERSION (it is "
        f"{layout.LAYOUT_VERSION}), then set GOLDEN_VERSION to it and GOLDEN_FINGERPRINT to "
        f"{GEOMETRY.fingerprint:#x} here"
    )


def test_magic_reads_as_text_in_a_dump() -> None:
    assert layout.MAGIC.to_bytes(8, "little") == b"DSA_INDX"


# The largest messages against the rings' slots.

SLOT_HEAD = 16
UINT32, UINT64, INT32_MIN, INT64_MIN = 2**32 - 1, 2**64 - 1, -(2**31), -(2**63)


def largest_plan(geometry: HandoffGeometry) -> bytes:
    plan = pb.StepPlan(
        step=UINT64,
        epoch=UINT64,
        rows=UINT32,
        requests=UINT32,
        decode_requests=UINT32,
        rows_per_decode=UINT32,
        layers=[UINT32] * len(geometry.layers),
        max_length=UINT64,
        exact=pb.ExactValues(
            seq_lens=[INT32_MIN] * geometry.max_requests,
            query_start=[INT32_MIN] * (geometry.max_requests + 1),
        ),
        trace=pb.TraceContext(trace_id=bytes(16), span_id=bytes(8), flags=UINT32),
        row_range=pb.RowRange(begin=UINT32, end=UINT32),
    )
    assert {field.name for field, _ in plan.ListFields()} == set(
        pb.StepPlan.DESCRIPTOR.fields_by_name
    )
    return plan.SerializeToString()


def largest_report(geometry: HandoffGeometry) -> bytes:
    fault = pb.RowFault(
        row=UINT32,
        request=UINT32,
        reason=pb.ROW_FAULT_REASON_TORN_INPUT,
        expected=INT64_MIN,
        seen=INT64_MIN,
    )
    report = pb.StepReport(
        step=UINT64,
        epoch=UINT64,
        status=pb.STEP_STATUS_FAILED,
        code=UINT32,
        message="x" * MESSAGE_BYTES,
        answered_layers=[UINT32] * len(geometry.layers),
        faults=[fault] * REPORTED_FAULTS,
        fault_count=UINT32,
        duration_ns=UINT64,
    )
    assert {field.name for field, _ in report.ListFields()} == set(
        pb.StepReport.DESCRIPTOR.fields_by_name
    )
    return report.SerializeToString()


@unhurried
@given(geometries)
def test_the_largest_plan_and_report_fit_into_their_slots(geometry: HandoffGeometry) -> None:
    assert len(largest_plan(geometry)) <= geometry.control.plan_slot - SLOT_HEAD
    assert len(largest_report(geometry)) <= geometry.control.report_slot - SLOT_HEAD


@pytest.mark.parametrize(
    ("constant", "value", "layers", "requests"),
    [
        ("_PLAN_BYTES_A_LAYER", 4, 400, 1),
        ("_PLAN_BYTES_A_REQUEST", 19, 1, 400),
        ("_PLAN_FIXED_BYTES", 64, 1, 1),
    ],
)
def test_planted_smaller_constants_do_not_hold_the_largest_plan(
    constant: str, value: int, layers: int, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, constant, value)
    geometry = replace(GEOMETRY, layers=tuple(range(layers)), max_requests=requests)
    assert len(largest_plan(geometry)) > geometry.control.plan_slot - SLOT_HEAD


def test_planted_smaller_constant_does_not_hold_the_largest_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout, "_REPORT_BYTES_A_FAULT", 32)
    geometry = replace(GEOMETRY)
    assert len(largest_report(geometry)) > geometry.control.report_slot - SLOT_HEAD
