"""Whatever a panel, an alert or a link asks for is something that the program tells."""

import re
from collections import defaultdict

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.observability import (
    Asked,
    alerts,
    metric_queries,
    names,
    rules,
    trace_queries,
)
from tests.deploy.watched import Watched
from tests.support.otlp import attributes

Told = dict[str, dict[str, set[str]]]
"""Values by name and label; of spans by field and "": they have no labels."""

_OF_RULES = [Asked(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
_FIELD = re.compile(r"\b((?:span|event|resource|trace)[.:][\w.]+)(?:\s*(=~|=)\s*([^\s)}|]+))?")


@pytest.fixture(scope="module")
def metrics(seen: Watched) -> Told:
    """What both ports said, what Prometheus adds to it, and what rules record."""
    told: Told = defaultdict(lambda: defaultdict(set))
    for side, text in seen.text.items():
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {**sample.labels, "job": f"dsa-indexer-{side}", "instance": ""}
                for label, value in labels.items():
                    told[sample.name][label].add(value)
    for rule in rules():
        if "record" in rule:
            told[rule["record"]] |= {label: set() for label in names(rule["expr"]).grouped}
    told["up"] |= {"job": set(), "instance": set()}
    told["ALERTS"] |= {
        "alertname": {alert["alert"] for alert in alerts()},
        "alertstate": {"pending", "firing"},
        "instance": set(),
        "kind": set(),
    }
    return told


@pytest.fixture(scope="module")
def spans(seen: Watched) -> Told:
    """Fields of spans, as TraceQL calls them."""
    told: Told = defaultdict(lambda: defaultdict(set))

    def add(field: str, value: object) -> None:
        told[field][""].add(str(value).lower() if isinstance(value, bool) else str(value))

    for process, span in seen.receiver.spans():
        add("span:name", span.name)
        failed = span.status.code == Status.STATUS_CODE_ERROR
        add("span:status", "error" if failed else "unset")
        add("span:duration", span.end_time_unix_nano - span.start_time_unix_nano)
        for name, value in process.items():
            add(f"resource.{name}", value)
        for name, value in attributes(span.attributes).items():
            add(f"span.{name}", value)
        for event in span.events:
            add("event:name", event.name)
            for name, value in attributes(event.attributes).items():
                add(f"event.{name}", value)
    return told


def unknown_metrics(expression: str, legend: str, told: Told) -> list[str]:
    """What of PromQL is told by nobody."""
    asked = names(expression)
    found = sorted(asked.metrics - set(told))
    labels = {label for metric in asked.metrics & set(told) for label in told[metric]}
    named = asked.grouped | set(re.findall(r"{{(\w+)}}", legend))
    found += sorted(named - labels)
    for metric, label, operator, value in asked.matchers:
        known = told.get(metric, {})
        values = known.get(label, set())
        if metric in told and label not in known:
            found.append(f"{metric}: {label}")
        if values and label != "instance":
            wanted = value.split("|") if "~" in operator else [re.escape(value)]
            found += [w for w in wanted if not any(re.fullmatch(w, v) for v in values)]
    return found


def unknown_fields(query: str, told: Told) -> list[str]:
    """What of TraceQL no span carries."""
    found = []
    for name, operator, value in _FIELD.findall(query):
        values = told.get(name, {}).get("", set())
        wanted = re.escape(value.strip('"')) if operator == "=" else value.strip('"')
        if not values:
            found.append(name)
        elif operator and not any(re.fullmatch(wanted, one) for one in values):
            found.append(f"{name} {operator} {value}")
    return found


@pytest.mark.parametrize("asked", [*metric_queries(), *_OF_RULES], ids=str)
def test_every_metric_and_label_is_told(asked: Asked, metrics: Told) -> None:
    assert unknown_metrics(asked.expression, asked.legend, metrics) == []


@pytest.mark.parametrize(
    ("expression", "legend", "unknown"),
    [
        ("sum(rate(dsa_indexer_step_total[5m]))", "", "dsa_indexer_step_total"),
        ("sum by (knd) (rate(dsa_indexer_findings_total[5m]))", "", "knd"),
        ("sum by (kind) (dsa_indexer_findings_total)", "{{kinds}}", "kinds"),
        ('up{state="1"} or dsa_indexer_steps_total{status="answerd"}', "", "answerd"),
        ('dsa_indexer_steps_total{state="answered"}', "", "dsa_indexer_steps_total: state"),
        ('dsa_indexer_findings_total{kind!~"nan_scores|wait_end"}', "", "wait_end"),
        ('ALERTS{alertname=~"DsaIndexr.*"}', "", "DsaIndexr.*"),
        ("dsa_indexer_stage_seconds", "", "dsa_indexer_stage_seconds"),
    ],
)
def test_a_planted_metric_is_seen(
    expression: str, legend: str, unknown: str, metrics: Told
) -> None:
    assert unknown in unknown_metrics(expression, legend, metrics)


@pytest.mark.parametrize("asked", trace_queries(), ids=str)
def test_every_field_of_a_span_is_told(asked: Asked, spans: Told) -> None:
    assert _FIELD.search(asked.expression)
    assert unknown_fields(asked.expression, spans) == []


@pytest.mark.parametrize(
    ("query", "unknown"),
    [
        ('{ span:name = "dsa.steps" }', 'span:name = "dsa.steps"'),
        ("{ span.dsa.row > 3 }", "span.dsa.row"),
        ('{ event.dsa.finding = "torn" }', 'event.dsa.finding = "torn"'),
        ("{ span.dsa.incomplete = yes }", "span.dsa.incomplete = yes"),
        ("{ } | select(event.dsa.kind)", "event.dsa.kind"),
        ('{ resource.service.name = "indexer" }', 'resource.service.name = "indexer"'),
    ],
)
def test_a_planted_field_is_seen(query: str, unknown: str, spans: Told) -> None:
    assert unknown_fields(query, spans) == [unknown]


def test_texts_of_alerts_name_labels_that_their_series_have(metrics: Told) -> None:
    for alert in alerts():
        expression = alert["expr"]
        grouped = names(expression).grouped - {"le"}
        of_series = {label for name in names(expression).metrics for label in metrics[name]}
        texts = " ".join(alert["annotations"].values())
        used = set(re.findall(r"\$labels\.(\w+)", texts))
        assert used <= (grouped or of_series), alert["alert"]
