"""A dashboard: rows of panels, and the variables at its top."""

from collections.abc import Sequence

from panels import COLUMNS, Panel
from queries import METRICS, Json

TAG = "dsa-indexer"
_SCHEMA = 41


def dashboard_link(uid: str, title: str, variables: str = "") -> Json:
    url = f"/d/{uid}?${{__url_time_range}}&${{instance:queryparam}}"
    return {"title": title, "url": f"{url}&{variables}" if variables else url}


def choice(name: str, label: str, query: str, *, many: bool = True) -> Json:
    """A variable with the values that a label has."""
    chosen = {"text": ["All"], "value": ["$__all"]} if many else {}
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": METRICS,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": many,
        "includeAll": many,
        "allValue": ".*" if many else None,
        "current": chosen,
    }


def fixed_choice(name: str, label: str, values: Sequence[str]) -> Json:
    first = {"text": values[0], "value": values[0]}
    return {
        "type": "custom",
        "name": name,
        "label": label,
        "query": ",".join(values),
        "current": first,
    }


def dashboard(
    uid: str,
    title: str,
    description: str,
    rows: Sequence[tuple[str, Sequence[Panel]]],
    variables: Sequence[Json] = (),
) -> Json:
    """Panels of a row stand beside each other while there is room."""
    panels: list[Json] = []
    y = 0
    for name, members in rows:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        row = {"id": len(panels) + 1, "type": "row", "title": name, "collapsed": False}
        panels.append({**row, "gridPos": place, "panels": []})
        x, y, tallest = 0, y + 1, 0
        for panel in members:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            panels.append(panel.json(len(panels) + 1, x, y))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    sources = [
        {
            "type": "datasource",
            "name": name,
            "label": kind.capitalize(),
            "query": kind,
            "current": {"text": kind.capitalize(), "value": kind},
        }
        for name, kind in (("metrics", "prometheus"), ("traces", "tempo"))
    ]
    processes = choice("instance", "Process", "label_values(dsa_indexer_findings_total, instance)")
    firing = {
        "name": "Alerts",
        "enable": True,
        "datasource": METRICS,
        "expr": 'ALERTS{alertname=~"DsaIndexer.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}} {{kind}}",
        "step": "60s",
        "iconColor": "red",
    }
    others = {
        "type": "dashboards",
        "title": "dsa-indexer",
        "tags": [TAG],
        "includeVars": True,
        "keepTime": True,
    }
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": [TAG],
        "schemaVersion": _SCHEMA,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": [firing]},
        "links": [others],
        "templating": {"list": [*sources, processes, *variables]},
        "panels": panels,
    }
