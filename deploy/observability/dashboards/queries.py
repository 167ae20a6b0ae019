"""PromQL of the panels."""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

METRICS: Json = {"type": "prometheus", "uid": "${metrics}"}

CHOSEN = 'instance=~"$instance"'
"""Processes that the variable at the top chooses."""


@dataclass(frozen=True)
class Query:
    """Attributes:
    expression: PromQL.
    legend: with labels as Grafana writes them.
    exemplars: show those of a histogram: points that lead to traces.
    now: one value, of the end of the time range.
    """

    expression: str
    legend: str = ""
    exemplars: bool = False
    now: bool = False

    def json(self, letter: str, **more: Any) -> Json:
        return {
            "refId": letter,
            "datasource": METRICS,
            "expr": self.expression,
            "legendFormat": self.legend,
            "exemplar": self.exemplars,
            "instant": self.now,
            "range": not self.now,
            **more,
        }


def summed(metric: str, *labels: str, by: str = "") -> str:
    """A second, of all chosen processes together, or by these labels; matchers may follow."""
    each = f"rate({metric}{{{', '.join([*labels, CHOSEN])}}}[$__rate_interval])"
    return f"sum by ({by}) ({each})" if by else f"sum({each})"


def grew(metric: str, *labels: str) -> str:
    """By how much, within the whole time range."""
    return f"increase({metric}{{{', '.join([*labels, CHOSEN])}}}[$__range])"


def quantile(share: float, histogram: str, *labels: str, by: str = "") -> str:
    """Of a histogram of seconds."""
    kept = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {summed(f'{histogram}_bucket', *labels, by=kept)})"


def quantiles(histogram: str, *labels: str) -> list[Query]:
    """Median and p99; both lead to traces."""
    return [
        Query(quantile(0.5, histogram, *labels), "p50"),
        Query(quantile(0.99, histogram, *labels), "p99", exemplars=True),
    ]
