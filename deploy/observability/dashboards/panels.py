"""Panels as Grafana's JSON wants them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from queries import METRICS, Json, Query, summed

COLUMNS = 24
"""Of Grafana's grid."""

TRACES: Json = {"type": "tempo", "uid": "${traces}"}


@dataclass
class Panel:
    """Attributes:
    unit: of its values; "none": there are none, or numbers of things.
    width, height: in Grafana's grid.
    body: everything else, in Grafana's form.
    """

    kind: str
    title: str
    description: str
    unit: str
    width: int
    height: int
    body: Json
    links: list[Json] = field(default_factory=list)

    def json(self, number: int, x: int, y: int) -> Json:
        body = dict(self.body)
        fields = {"unit": self.unit, **body.pop("fields", {})}
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": fields, "overrides": []},
            "links": self.links,
            **body,
        }


def lines(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    width: int = 8,
    stacked: str = "none",
    links: Sequence[Json] = (),
    value_links: Sequence[Json] = (),
) -> Panel:
    """Series over time; `stacked`: "none", "normal", or "percent" of their sum."""
    fields: Json = {
        "min": 0,
        "links": list(value_links),
        "custom": {
            "drawStyle": "line",
            "lineInterpolation": "linear",
            "fillOpacity": 8 if stacked == "none" else 40,
            "showPoints": "never",
            "stacking": {"mode": stacked},
        },
    }
    options = {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    targets = [query.json(chr(ord("A") + place)) for place, query in enumerate(queries)]
    body = {"datasource": METRICS, "fields": fields, "options": options, "targets": targets}
    return Panel("timeseries", title, description, unit, width, 8, body, list(links))


def number(
    title: str,
    description: str,
    unit: str,
    query: str,
    *,
    warns: float | None = None,
    alarms: float | None = None,
    legend: str = "",
    width: int = 4,
    links: Sequence[Json] = (),
    value_links: Sequence[Json] = (),
) -> Panel:
    """Values as they are now; yellow from `warns`, red from `alarms`."""
    steps: list[Json] = [{"color": "green", "value": None}]
    for color, value in (("yellow", warns), ("red", alarms)):
        if value is not None:
            steps.append({"color": color, "value": value})
    fields = {"thresholds": {"mode": "absolute", "steps": steps}, "links": list(value_links)}
    options = {
        "colorMode": "background" if len(steps) > 1 else "value",
        "graphMode": "none",
        "reduceOptions": {"calcs": ["lastNotNull"]},
        "textMode": "value_and_name" if legend else "value",
    }
    targets = [Query(query, legend, now=True).json("A")]
    body = {"datasource": METRICS, "fields": fields, "options": options, "targets": targets}
    return Panel("stat", title, description, unit, width, 4, body, list(links))


def bars(title: str, description: str, unit: str, queries: Sequence[Query], width: int) -> Panel:
    """One bar a query, in their order."""
    targets = [query.json(chr(ord("A") + place)) for place, query in enumerate(queries)]
    options = {
        "orientation": "horizontal",
        "displayMode": "basic",
        "valueMode": "text",
        "reduceOptions": {"calcs": ["lastNotNull"]},
    }
    fields: Json = {"min": 0, "color": {"mode": "palette-classic"}}
    body = {"datasource": METRICS, "fields": fields, "options": options, "targets": targets}
    return Panel("bargauge", title, description, unit, width, 9, body)


def heatmap(title: str, description: str, histogram: str, *labels: str, width: int = 12) -> Panel:
    """How many values of which duration, over time."""
    expression = summed(f"{histogram}_bucket", *labels, by="le")
    target = Query(expression, "{{le}}", exemplars=True).json("A", format="heatmap")
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
        "exemplars": {"color": "rgba(31, 96, 196, 0.9)"},
        "yAxis": {"unit": "s"},
        "tooltip": {"mode": "single", "yHistogram": True},
    }
    body = {"datasource": METRICS, "options": options, "targets": [target]}
    return Panel("heatmap", title, description, "s", width, 9, body)


def alerts(title: str, description: str) -> Panel:
    """Those that fire now, as Prometheus has them."""
    query = Query('ALERTS{alertname=~"DsaIndexer.*", alertstate="firing"}', now=True)
    hidden = dict.fromkeys(("Time", "Value", "__name__", "alertstate"), True)
    body = {
        "datasource": METRICS,
        "targets": [query.json("A", format="table")],
        "options": {"showHeader": True},
        "transformations": [{"id": "organize", "options": {"excludeByName": hidden}}],
    }
    return Panel("table", title, description, "none", COLUMNS, 5, body)


def spans(title: str, description: str, query: str, width: int = 12) -> Panel:
    """The newest spans that a TraceQL query finds; each leads to its trace."""
    target = {
        "refId": "A",
        "datasource": TRACES,
        "queryType": "traceql",
        "query": query,
        "limit": 50,
        "spss": 3,
        "tableType": "spans",
    }
    body = {"datasource": TRACES, "targets": [target], "options": {"showHeader": True}}
    return Panel("table", title, description, "none", width, 9, body)


def text(title: str, description: str, markdown: str) -> Panel:
    options = {"mode": "markdown", "content": markdown}
    return Panel("text", title, description, "none", COLUMNS, 11, {"options": options})
