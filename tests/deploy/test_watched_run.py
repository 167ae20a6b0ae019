"""A real run: spans arrive whole by OTLP, a real Prometheus scrapes it, and an alert fires."""

import re
from collections import Counter, defaultdict

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ipc_handoff.stages import SERVICE_SPANS, STEP_SPAN, WORKER_SPANS
from ipc_handoff.telemetry.catalogue import METRICS, Kind
from tests.deploy.observability import metric_queries
from tests.deploy.prometheus import SERVER
from tests.deploy.watched import RACE, SHAPE, Watched
from tests.support.otlp import attributes

WORKER = {span.name for span in WORKER_SPANS}
SERVICE = {span.name for span in SERVICE_SPANS}
LAYERS = len(SHAPE.layers)
WHOLE = {STEP_SPAN: 1} | dict.fromkeys(WORKER | SERVICE, LAYERS)

EVERY = {"dsa.step", "dsa.epoch"}
OF_BATCH = {"dsa.rows", "dsa.requests", "dsa.context"}
OF_ATTACHMENT = {"dsa.engine", "dsa.placement"}
OF_STEP = EVERY | OF_BATCH | OF_ATTACHMENT
OF_STEP |= {"dsa.request_ids", "dsa.bank", "dsa.bank_generation", "dsa.slot"}
OF_WORKER = EVERY | {"dsa.layer", "dsa.source"}
OF_SERVICE = EVERY | OF_BATCH | OF_ATTACHMENT | {"dsa.layer", "dsa.status", "dsa.faulted_rows"}

needs_prometheus = pytest.mark.skipif(
    SERVER is None, reason="needs Prometheus (Debian's package; `make test` gets it)"
)


def steps(seen: Watched) -> dict[int, list[tuple[str, Span]]]:
    """Who told, and what, of each step."""
    found = defaultdict(list)
    for process, span in seen.receiver.spans():
        if span.name.startswith("dsa."):
            number = attributes(span.attributes)["dsa.step"]
            found[number].append((process["service.name"], span))
    return dict(found)


def test_a_step_arrives_as_one_trace_of_both_processes(seen: Watched) -> None:
    told = steps(seen)
    traces = set()
    for number in seen.clean:
        spans = [span for _, span in told[number]]
        assert Counter(span.name for span in spans) == WHOLE
        (step,) = [span for span in spans if span.name == STEP_SPAN]
        assert {span.trace_id for span in spans} == {step.trace_id}
        assert all(span.parent_span_id == step.span_id for span in spans if span is not step)
        assert {who for who, _ in told[number]} == {"dsa-indexer-worker", "dsa-indexer-service"}
        traces.add(step.trace_id)
    assert len(traces) == len(seen.clean)


def test_nothing_is_lost_at_shutdown(seen: Watched) -> None:
    """Every step's span has come, also of those just before the end; the service ended well."""
    assert sorted(steps(seen)) == list(range(1, seen.last + 1))
    assert seen.status == 0


def test_spans_carry_every_attribute(seen: Watched) -> None:
    for number in seen.clean:
        for who, span in steps(seen)[number]:
            of_stage = OF_SERVICE if span.name in SERVICE else OF_WORKER
            expected = OF_STEP if span.name == STEP_SPAN else of_stage
            assert set(attributes(span.attributes)) == expected, (who, span.name)


def test_a_race_arrives_on_the_stage_that_raced(seen: Watched) -> None:
    by_process = defaultdict(list)
    assert len({span.trace_id for _, span in steps(seen)[seen.torn]}) == 1
    for who, span in steps(seen)[seen.torn]:
        by_process[who] += [(span.name, attributes(event.attributes)) for event in span.events]
    (of_service,) = [e for _, e in by_process["dsa-indexer-service"] if "dsa.finding" in e]
    (of_worker,) = [e for _, e in by_process["dsa-indexer-worker"] if "dsa.finding" in e]
    for event, request in ((of_service, "#0"), (of_worker, "chat-0")):
        told = {name: event[f"dsa.{name}"] for name in ("finding", "stage", "row", "request")}
        assert told == {"finding": RACE, "stage": "dsa.gate", "row": 0, "request": request}
        assert int(event["dsa.expected"]) == int(event["dsa.seen"]) + 1


def test_a_lost_service_is_told_by_the_worker(seen: Watched) -> None:
    told = steps(seen)[seen.lost]
    incomplete = [s for _, s in told if attributes(s.attributes).get("dsa.incomplete")]
    assert {span.name for span in incomplete} <= SERVICE and incomplete
    (step,) = [span for _, span in told if span.name == STEP_SPAN]
    events = {event.name: attributes(event.attributes) for event in step.events}
    assert events["detached"]["dsa.reason"]


def test_exemplars_lead_to_traces_that_arrived(seen: Watched) -> None:
    arrived = {span.trace_id for _, span in seen.receiver.spans()}
    led = defaultdict(set)
    for process, metric in seen.receiver.metrics():
        for point in metric.histogram.data_points:
            leads = {exemplar.trace_id for exemplar in point.exemplars}
            led[process["service.name"], metric.name] |= leads
    told = {"dsa_indexer_stage", "dsa_indexer_step"}
    assert {name for _, name in led} == told
    assert len(led) == 2 * len(told)
    for leads in led.values():
        assert leads and leads <= arrived


def test_processes_are_told_apart(seen: Watched) -> None:
    """The collector makes `job` and `instance` of these."""
    names = {
        (process["service.name"], process["service.instance.id"])
        for process, _ in seen.receiver.metrics()
    }
    assert {name for name, _ in names} == {"dsa-indexer-worker", "dsa-indexer-service"}
    assert len({instance for _, instance in names}) == 2


def test_otlp_and_port_tell_the_same_metrics(seen: Watched) -> None:
    """In the names that the collector makes of OTLP's: with units, and `_total`."""
    by_otlp = defaultdict(set)
    for process, metric in seen.receiver.metrics():
        unit = {"": "", "s": "_seconds", "By": "_bytes"}[metric.unit]
        counts = metric.WhichOneof("data") == "sum" and metric.sum.is_monotonic
        name = f"{metric.name}{unit}{'_total' if counts else ''}"
        by_otlp[process["service.name"].rpartition("-")[2]].add(name)
    for side, text in seen.text.items():
        told = {
            metric.prometheus_name
            for metric in METRICS
            if side in metric.sides
            and f"# TYPE {metric.prometheus_name} {metric.kind.value}" in text
        }
        assert told == by_otlp[side]
        assert {metric.kind for metric in METRICS if metric.prometheus_name in told} >= {
            Kind.COUNTER,
            Kind.HISTOGRAM,
        }


@needs_prometheus
def test_the_race_fires_its_alert_for_both_sides(seen: Watched) -> None:
    labels = [alert["labels"] for alert in seen.alerts]
    assert {label["job"] for label in labels} == {"dsa-indexer-service", "dsa-indexer-worker"}
    for alert in seen.alerts:
        assert alert["labels"]["kind"] == RACE
        assert alert["labels"]["severity"] == "critical"
        assert alert["annotations"]["summary"].startswith(f"{RACE}: 127.0.0.1:")
        assert re.search(rf"found about \d of kind {RACE} ", alert["annotations"]["description"])


@needs_prometheus
@pytest.mark.parametrize("asked", metric_queries(), ids=str)
def test_a_panel_shows_something(seen: Watched, asked) -> None:
    """And its legend has the labels that it names."""
    assert seen.series is not None
    series = seen.series[asked.where]
    assert any(one["value"][1] != "NaN" for one in series), asked.expression
    legend = {part.split("}}")[0] for part in asked.legend.split("{{")[1:]}
    if asked.where.endswith("annotation"):
        legend -= {"kind"}  # not every alert has it
    for one in series:
        assert legend <= set(one["metric"]), one["metric"]
