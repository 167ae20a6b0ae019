"""Puts the records of all sessions together: histograms by shape of step, and over time."""

from dataclasses import dataclass, field

import numpy as np

from dsa_indexer_cli.load.histograms import Histogram, merged
from dsa_indexer_cli.load.messages import NOT_BEGUN, Column
from dsa_indexer_cli.load.steps import Kind
from dsa_indexer_cli.load.worker import NO_TIME

_NANOSECONDS = 1_000_000_000
_MOST_POINTS = 300
_POINT_DIGITS = 2


@dataclass(frozen=True, order=True)
class ShapeKey:
    """Steps that are counted together: requests and context are upper bounds, powers of two."""

    kind: Kind
    requests: int
    context: int


@dataclass
class ShapeTimes:
    """Of the steps of one shape.

    Attributes:
        response: from the time at which a step was to begin.
        step, layer: from the time at which it did.
        forward: of all its layers, by the GPU's clock.
    """

    response: Histogram = field(default_factory=Histogram)
    step: Histogram = field(default_factory=Histogram)
    layer: Histogram = field(default_factory=Histogram)
    forward: Histogram = field(default_factory=Histogram)
    rows: int = 0


@dataclass
class Point:
    """A stretch of time: steps that ended in it, and their responses."""

    steps: int = 0
    response: Histogram = field(default_factory=lambda: Histogram(_POINT_DIGITS))


class Collector:
    """Args:
    begin: nanoseconds of the monotonic clock at which counting begins: after the warm-up.
    seconds: how long is counted.
    """

    def __init__(self, begin: int, seconds: float) -> None:
        self.begin = begin
        self.point_seconds = max(1.0, seconds / _MOST_POINTS)
        self.shapes: dict[ShapeKey, ShapeTimes] = {}
        self.points: dict[int, Point] = {}
        self.steps = self.rows = self.layers = self.inline_layers = self.unserved = 0
        self.last = begin
        self.latest = Histogram(_POINT_DIGITS)

    def add(self, records: np.ndarray) -> None:
        """Records of a session: int64 [n, width]."""
        for record in records[records[:, Column.INTENDED] >= self.begin]:
            self._add(record)

    def _add(self, record: np.ndarray) -> None:
        shape = self._shape(record)
        intended, ended = int(record[Column.INTENDED]), int(record[Column.ENDED])
        # Also of a step that was never begun: it has waited so long at least.
        shape.response.record(ended - intended)
        self.latest.record(ended - intended)
        if record[Column.BEGAN] == NOT_BEGUN:
            self.unserved += 1
            return
        point = self.points.setdefault(
            int((ended - self.begin) / _NANOSECONDS / self.point_seconds), Point()
        )
        point.steps += 1
        point.response.record(ended - intended)
        shape.step.record(ended - record[Column.BEGAN])
        layers = record[len(Column) :]
        for layer in layers[layers >= 0]:
            shape.layer.record(layer)
        if record[Column.FORWARD] != NO_TIME:
            shape.forward.record(record[Column.FORWARD])
        shape.rows += int(record[Column.ROWS])
        self.steps += 1
        self.rows += int(record[Column.ROWS])
        self.layers += int(record[Column.LAYERS])
        self.inline_layers += int(record[Column.INLINE])
        self.last = max(self.last, ended)

    def _shape(self, record: np.ndarray) -> ShapeTimes:
        key = ShapeKey(
            Kind(record[Column.KIND]),
            _power_of_two(int(record[Column.REQUESTS])),
            _power_of_two(int(record[Column.LONGEST])),
        )
        return self.shapes.setdefault(key, ShapeTimes())

    def take_latest(self) -> Histogram:
        """Responses since it was last asked."""
        latest, self.latest = self.latest, Histogram(_POINT_DIGITS)
        return latest

    @property
    def response(self) -> Histogram:
        return merged(shape.response for shape in self.shapes.values())

    @property
    def step(self) -> Histogram:
        return merged(shape.step for shape in self.shapes.values())

    @property
    def layer(self) -> Histogram:
        return merged(shape.layer for shape in self.shapes.values())

    @property
    def forward(self) -> Histogram:
        return merged(shape.forward for shape in self.shapes.values())


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
