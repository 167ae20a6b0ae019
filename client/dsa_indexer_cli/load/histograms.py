"""Times of steps and layers as HDR histograms: three digits up to ten minutes, however many values
there are."""

from collections.abc import Iterable
from dataclasses import dataclass

from hdrh.histogram import HdrHistogram

_LEAST, _MOST, _DIGITS = 1, 600_000_000_000, 3
_MILLISECOND = 1_000_000


@dataclass(frozen=True)
class Times:
    """Milliseconds, of `count` values.

    Attributes:
        encoded: the histogram itself, in HdrHistogram's own base64 form (nanoseconds).
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    most: float
    encoded: str = ""


class Histogram:
    """Nanoseconds in, milliseconds out."""

    def __init__(self, digits: int = _DIGITS) -> None:
        self._histogram = HdrHistogram(_LEAST, _MOST, digits)

    def record(self, nanoseconds: int) -> None:
        self._histogram.record_value(min(max(int(nanoseconds), 1), _MOST))

    def add(self, other: "Histogram") -> None:
        self._histogram.add(other._histogram)

    @property
    def count(self) -> int:
        return int(self._histogram.get_total_count())

    def percentile(self, percentile: float) -> float:
        return float(self._histogram.get_value_at_percentile(percentile)) / _MILLISECOND

    def times(self, *, encoded: bool = False) -> Times:
        found = self._histogram
        return Times(
            count=self.count,
            mean=float(found.get_mean_value()) / _MILLISECOND if self.count else 0.0,
            p50=self.percentile(50.0),
            p90=self.percentile(90.0),
            p99=self.percentile(99.0),
            p999=self.percentile(99.9),
            most=float(found.get_max_value()) / _MILLISECOND,
            encoded=found.encode().decode() if encoded else "",
        )


def merged(histograms: Iterable[Histogram]) -> Histogram:
    total = Histogram()
    for histogram in histograms:
        total.add(histogram)
    return total
