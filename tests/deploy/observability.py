"""What the files of deploy/observability ask for: PromQL and TraceQL, with their names."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.deploy.programs import FOLDER

OBSERVABILITY = FOLDER / "observability"
PROMETHEUS = OBSERVABILITY / "prometheus"
RULES = PROMETHEUS / "rules.yaml"
GRAFANA = OBSERVABILITY / "grafana"

Json = dict[str, Any]

_WORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "bool", "and", "or"}
_WORDS |= {"unless", "offset"}
_NAME = r"[a-zA-Z_:][\w:]*"
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_MATCHER = re.compile(rf'({_NAME})\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_VARIABLES = {"$__rate_interval": "10m", "$__range": "10m", "$instance": ".*", "$kind": ".*"}
_VARIABLES |= {"$stage": "dsa.logits", "$slow": "1ms", "$__tags": 'job=~".*"'}


@dataclass(frozen=True)
class Asked:
    """An expression of a panel or rule.

    Attributes:
        where: for people.
        legend: how its series are named.
    """

    where: str
    expression: str
    legend: str = ""

    def __str__(self) -> str:
        return self.where


@dataclass
class Names:
    """What a PromQL expression names.

    Attributes:
        matchers: metric, label, operator, value.
        grouped: labels that series are grouped or matched by.
    """

    metrics: set[str] = field(default_factory=set)
    matchers: list[tuple[str, str, str, str]] = field(default_factory=list)
    grouped: set[str] = field(default_factory=set)


def filled(expression: str) -> str:
    """With values in the place of Grafana's variables."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def names(expression: str) -> Names:
    """Of PromQL without variables."""
    found = Names()
    for labels in _GROUPED.findall(expression):
        found.grouped |= {label.strip() for label in labels.split(",")} - {""}
    rest = _GROUPED.sub(" ", expression)
    for metric, matchers in re.findall(rf"({_NAME})\s*{{([^}}]*)}}", rest):
        found.metrics.add(metric)
        found.matchers += [(metric, *matcher) for matcher in _MATCHER.findall(matchers)]
    rest = re.sub(r"{[^}]*}|\[[^]]*\]", " ", rest)
    bare = re.findall(rf"(?<![\w:.])({_NAME})\b(?!\s*\()", rest)
    found.metrics |= set(bare) - _WORDS
    return found


def dashboards() -> dict[str, Json]:
    """By file name."""
    return {
        path.name: json.loads(path.read_text())
        for path in sorted((GRAFANA / "dashboards").glob("*.json"))
    }


def panels(dashboard: Json) -> list[Json]:
    """Those that show something."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def _targets(kind: str) -> Iterator[tuple[str, Json]]:
    for name, dashboard in dashboards().items():
        for panel in panels(dashboard):
            for target in panel.get("targets", []):
                if target["datasource"]["type"] == kind:
                    yield f"{name}: {panel['title']}, {target['refId']}", target


def metric_queries() -> list[Asked]:
    """PromQL of panels, variables, annotations and of the link from spans to metrics."""
    found = [
        Asked(where, filled(target["expr"]), target["legendFormat"])
        for where, target in _targets("prometheus")
    ]
    for name, dashboard in dashboards().items():
        for note in dashboard["annotations"]["list"]:
            found.append(Asked(f"{name}: annotation", filled(note["expr"]), note["textFormat"]))
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.fullmatch(
                    r"label_values\((\w+), (\w+)\)", variable["query"]["query"]
                ).groups()
                where = f"{name}: variable {variable['name']}"
                found.append(Asked(where, f"count by ({label}) ({metric})", f"{{{{{label}}}}}"))
    for source in data_sources():
        for query in source["jsonData"].get("tracesToMetrics", {}).get("queries", []):
            expression = filled(query["query"].replace("$$", "$"))
            found.append(Asked(f"from spans: {query['name']}", expression))
    return found


def trace_queries() -> list[Asked]:
    """TraceQL of panels."""
    return [Asked(where, filled(target["query"])) for where, target in _targets("tempo")]


def data_sources() -> list[Json]:
    path = GRAFANA / "provisioning" / "datasources" / "datasources.yaml"
    sources = yaml.safe_load(path.read_text())["datasources"]
    assert isinstance(sources, list)
    return sources


def rules() -> list[Json]:
    """Recording and alerting ones."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[Json]:
    return [rule for rule in rules() if "alert" in rule]
