"""Where every shared byte lies. Both sides compute it from the geometry; neither sends it.

A session starts only if version and fingerprint agree. Bump `LAYOUT_VERSION` when a byte
changes its meaning or an area moves.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cached_property

from ipc_handoff.device_layout import DeviceLayout
from ipc_handoff.stages import SERVICE_STAGES
from ipc_handoff.words import WORD_BYTES

LAYOUT_VERSION = 5
MAGIC = 0x5844_4E49_5F41_5344  # "DSA_INDX" as little-endian bytes
CACHE_LINE = 64

RING_CAPACITY = 64
STAMPED_STEPS = 128
HELD_STEPS = 32
"""Traced steps that a side holds undecided: fewer than any ring of stamps has."""
REPORTED_FAULTS = 64
MESSAGE_BYTES = 512

_PLAN_FIXED_BYTES = 256
_PLAN_BYTES_A_LAYER = 6
_PLAN_BYTES_A_REQUEST = 21
_REPORT_BYTES_A_FAULT = 48


@dataclass(frozen=True)
class Area:
    """A contiguous range of bytes inside a region."""

    name: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size

    def of(self, buffer: memoryview) -> memoryview:
        return buffer[self.offset : self.end]


@dataclass(frozen=True)
class HandoffGeometry:
    """What the layout depends on.

    Attributes:
        layers: ids of the layers that have an indexer, ascending.
        heads, head_dim: of the index queries.
        top_k: indices a row.
        page_size: tokens a page of the K cache.
        max_rows: most query tokens of a step.
        max_requests: most requests of a step.
        max_context: most tokens of a request.
        slots: steps that may be in flight in one bank.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    top_k: int
    page_size: int
    max_rows: int
    max_requests: int
    max_context: int
    slots: int = 4

    @property
    def table_width(self) -> int:
        """Pages a row of the block table."""
        return self.columns(self.max_context)

    def columns(self, tokens: int) -> int:
        """Columns of the block table that so many tokens fill: the one formula for it."""
        return -(-tokens // self.page_size)

    @cached_property
    def control(self) -> "ControlLayout":
        return ControlLayout.of(self)

    @cached_property
    def staging(self) -> "SlottedLayout":
        rows, requests = self.max_rows, self.max_requests
        return SlottedLayout.of(
            self.slots,
            [
                ("q", rows * self.heads * self.head_dim),
                ("weights", rows * self.heads * 4),
                ("query_start", (requests + 1) * 4),
                ("seq_lens", requests * 4),
                ("block_table", requests * self.table_width * 4),
            ],
        )

    @cached_property
    def answers(self) -> "SlottedLayout":
        return SlottedLayout.of(self.slots, [("indices", self.max_rows * self.top_k * 4)])

    @cached_property
    def device(self) -> DeviceLayout:
        """Of banks in device memory; the control block stays in the host's."""
        return DeviceLayout.of(self)

    @cached_property
    def fingerprint(self) -> int:
        """64 bits that differ when any byte lies elsewhere or means something else.

        The fields themselves are in it: areas are rounded up to cache lines, so other row
        strides may fill the same areas.
        """
        parts = [str(LAYOUT_VERSION), repr(astuple(self))]
        for label, layout in (("c", self.control), ("s", self.staging), ("a", self.answers)):
            parts += [f"{label}:{a.name}@{a.offset}+{a.size}" for a in layout.areas.values()]
            parts.append(f"{label}={layout.size}")
        parts.append(f"slots={self.control.plan_slot},{self.control.report_slot}")
        parts += [stage.name for stage in SERVICE_STAGES]
        parts.append(repr(astuple(self.device)))
        return int.from_bytes(hashlib.sha256(";".join(parts).encode()).digest()[:8], "little")


def _aligned(size: int, unit: int = CACHE_LINE) -> int:
    return -(-size // unit) * unit


def _place(named_sizes: Iterable[tuple[str, int]]) -> tuple[dict[str, Area], int]:
    """Areas one behind the other, each at a cache line; and where they end."""
    areas, offset = {}, 0
    for name, size in named_sizes:
        areas[name] = Area(name, offset, _aligned(size))
        offset = areas[name].end
    return areas, offset


@dataclass(frozen=True)
class SlottedLayout:
    """The same areas once a slot."""

    areas: dict[str, Area]
    slot_size: int
    slots: int

    @classmethod
    def of(cls, slots: int, named_sizes: list[tuple[str, int]]) -> "SlottedLayout":
        areas, end = _place(named_sizes)
        return cls(areas, end, slots)

    @property
    def size(self) -> int:
        return self.slot_size * self.slots

    def slot_of(self, step: int) -> int:
        return step % self.slots


@dataclass(frozen=True)
class ControlLayout:
    """The control block: header, doorbells, rings, the service's stamps.

    `requests` and `dones` have one word a layer ordinal, `staged_*` and `answered_layers` one a
    slot; each word has its own cache line. What concerns traces has one word a step, packed: it is
    written off the hot path.
    """

    areas: dict[str, Area]
    size: int
    plan_slot: int
    report_slot: int

    @classmethod
    def of(cls, geometry: HandoffGeometry) -> "ControlLayout":
        layers = len(geometry.layers)
        plan = _aligned(
            _PLAN_FIXED_BYTES
            + _PLAN_BYTES_A_LAYER * layers
            + _PLAN_BYTES_A_REQUEST * geometry.max_requests
        )
        report = _aligned(
            MESSAGE_BYTES
            + _PLAN_FIXED_BYTES
            + _PLAN_BYTES_A_LAYER * layers
            + _REPORT_BYTES_A_FAULT * REPORTED_FAULTS
        )
        areas, size = _place(
            [
                ("header", CACHE_LINE),
                ("published", CACHE_LINE),
                ("detached", CACHE_LINE),
                ("requests", CACHE_LINE * layers),
                ("progress", CACHE_LINE),
                ("cancelled", CACHE_LINE),
                ("drained", CACHE_LINE),
                ("exported", WORD_BYTES * STAMPED_STEPS),
                ("worker_kept", WORD_BYTES * STAMPED_STEPS),
                ("service_kept", WORD_BYTES * STAMPED_STEPS),
                ("dones", CACHE_LINE * layers),
                ("staged_inputs", CACHE_LINE * geometry.slots),
                ("staged_layers", CACHE_LINE * geometry.slots),
                ("answered_layers", CACHE_LINE * geometry.slots),
                ("plans_consumed", CACHE_LINE),
                ("plans", plan * RING_CAPACITY),
                ("reports_consumed", CACHE_LINE),
                ("reports", report * RING_CAPACITY),
                ("service_stamps", stamp_block_bytes(layers, len(SERVICE_STAGES)) * STAMPED_STEPS),
            ]
        )
        return cls(areas, size, plan, report)


def stamp_block_bytes(layers: int, stages: int) -> int:
    """Bytes of one step's stamps: a generation word, then one word a layer and stage."""
    return _aligned(WORD_BYTES * (1 + layers * stages))
