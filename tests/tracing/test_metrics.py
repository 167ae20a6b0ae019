"""Metrics: what is emitted is what the docs' table says, and means what it says."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import Source
from indexer_service.events import FinishedStep
from indexer_service.metrics import StepMetrics
from ipc_handoff.findings import Finding, FindingKind
from ipc_handoff.telemetry.catalogue import METRICS, Kind
from ipc_handoff.telemetry.metrics import Metrics
from ipc_handoff.telemetry.settings import MetricSettings
from tests.support.plants import Pair, pair
from tests.support.traces import Traced, attended_step, traced
from tests.support.waiting import SOON, eventually
from tests.support.workloads import Shape

SMALL = Shape(layers=(1, 2), requests=1)


class Told:
    """What a side's metrics say now."""

    def __init__(self, name: str) -> None:
        self._reader = InMemoryMetricReader()
        self.metrics = Metrics(MetricSettings(name), [self._reader])

    def points(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        found: dict[str, list[Any]] = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                found |= {metric.name: list(metric.data.data_points) for metric in scope.metrics}
        return found

    def values(self, name: str) -> dict[str, float]:
        """By label."""
        found: dict[str, float] = {}
        for point in self.points().get(name, []):
            (label,) = point.attributes.values() or ("",)
            found[str(label)] = getattr(point, "value", None) or getattr(point, "count", 0)
        return found

    def counted(self, name: str) -> dict[str, float]:
        """By label, of what has happened at all."""
        return {label: value for label, value in self.values(name).items() if value}


@contextmanager
def measured(folder: Path, **fields: Any) -> Iterator[tuple[Pair, Traced, Told, Told]]:
    """A traced pair whose two sides have metrics."""
    worker, service = Told("worker"), Told("service")
    step_metrics = StepMetrics(service.metrics)
    with traced(folder, metrics=worker.metrics, step_metrics=step_metrics, **fields) as made:
        step_metrics.observe_traces(made[1].telemetry)
        yield *made, worker, service


def a_finding(running: Pair, kind: FindingKind = FindingKind.BAD_PAGE) -> Finding:
    epoch = running.session.epoch or 0
    return Finding(kind, running.session._steps, epoch, None, None, None, None, "1", "2")


def test_counters_count_what_happened(tmp_path: Path) -> None:
    with measured(tmp_path, shape=SMALL) as (running, both, worker, service):
        for _ in range(5):
            attended_step(running)
        assert worker.values("dsa_indexer_layers") == {"service": 10, "inline": 0}
        assert eventually(lambda: service.counted("dsa_indexer_steps") == {"answered": 5})
        assert service.values("dsa_indexer_sessions") == {"": 1}
        assert service.values("dsa_indexer_regions") == {"": 3 + len(SMALL.layers)}
        mapped = service.values("dsa_indexer_mapped")[""]
        assert mapped > SMALL.geometry.control.size
        running.session.found(a_finding(running))
        both.telemetry.found(a_finding(running))
        with running.stalled():
            assert Source.INLINE in running.step()
        running.session.wait_attached(SOON)
        running.step()
        assert worker.values("dsa_indexer_layers") == {"service": 12, "inline": 2}
        assert worker.values("dsa_indexer_attachments") == {"": 2}
        assert worker.values("dsa_indexer_reattachments") == {"": 1}
        assert worker.values("dsa_indexer_detachments") == {"": 1}
        assert worker.counted("dsa_indexer_findings") == {"bad_page": 1, "wait_ended": 1}
        steps = {"answered": 6, "cancelled": 1}
        assert eventually(lambda: service.counted("dsa_indexer_steps") == steps)
        assert worker.values("dsa_indexer_traces") == {"kept": 7, "dropped": 0}
        assert eventually(lambda: service.values("dsa_indexer_traces")["kept"] == 6)
        assert worker.values("dsa_indexer_lost_stamps") == {"worker": 0}


def test_a_step_without_times_has_lost_none(tmp_path: Path) -> None:
    service = Told("service")
    metrics = StepMetrics(service.metrics)
    plan = pb.StepPlan(step=9, trace=pb.TraceContext(trace_id=b"1" * 16))
    report = pb.StepReport(step=9, status=pb.STEP_STATUS_CANCELLED)
    metrics.step_finished(FinishedStep(plan, report, (), []))
    assert service.counted("dsa_indexer_steps") == {"cancelled": 1}
    assert service.values("dsa_indexer_lost_stamps") == {"service": 0}
    metrics.step_finished(FinishedStep(plan, report, None, []))
    assert service.values("dsa_indexer_lost_stamps") == {"service": 1}


def test_a_finding_in_the_service_is_counted_by_kind() -> None:
    told = Told("service")
    metrics = StepMetrics(told.metrics)
    for kind in (FindingKind.BAD_PAGE, FindingKind.NAN_SCORES, FindingKind.BAD_PAGE):
        metrics.found(Finding(kind, 1, 1, None, None, None, None, "", ""))
    assert told.counted("dsa_indexer_findings") == {"bad_page": 2, "nan_scores": 1}


def test_what_has_not_happened_yet_is_told_as_zero(tmp_path: Path) -> None:
    """A rate does not see the first event of a series that begins with it."""
    kinds = dict.fromkeys(FindingKind, 0)
    statuses = dict.fromkeys(("answered", "cancelled", "failed", "rejected"), 0)
    with measured(tmp_path, shape=SMALL) as (_, _, worker, service):
        assert worker.values("dsa_indexer_findings") == kinds
        assert service.values("dsa_indexer_findings") == kinds
        assert service.values("dsa_indexer_steps") == statuses
        assert service.values("dsa_indexer_faulted_rows") == {"": 0}
        assert service.values("dsa_indexer_lost_stamps") == {"service": 0}


def test_a_plan_of_an_old_epoch_is_counted(tmp_path: Path) -> None:
    with measured(tmp_path, shape=SMALL) as (running, _, _, service):
        attended_step(running)
        attachment = running.session._attachment
        assert attachment is not None
        assert service.values("dsa_indexer_stale_epochs") == {"": 0}
        plan = running.case().inputs.plan(9, attachment.epoch - 1, SMALL.layers)
        attachment.bank.control.plans.post(plan.SerializeToString())
        attachment.wake_service.ring()
        assert eventually(lambda: service.values("dsa_indexer_stale_epochs") == {"": 1})
        with pytest.raises(Exception, match="epoch"):
            attachment.control_plane.keep_alive(
                pb.KeepAliveRequest(session_id=attachment.session_id, epoch=attachment.epoch - 1)
            )
        assert service.values("dsa_indexer_stale_epochs") == {"": 2}
        assert eventually(lambda: service.values("dsa_indexer_steps").get("rejected") == 1)


def test_stages_are_timed_on_both_sides_one_layer_a_step(tmp_path: Path) -> None:
    steps = 6
    with measured(tmp_path, shape=SMALL) as (running, _, worker, service):
        for _ in range(steps):
            attended_step(running)
        of_worker = {"dsa.stage": steps, "dsa.handback": steps, "dsa.attend": steps}
        assert worker.values("dsa_indexer_stage") == of_worker
        of_service = dict.fromkeys(("dsa.gate", "dsa.logits", "dsa.topk", "dsa.answer"), steps)
        assert eventually(lambda: service.values("dsa_indexer_stage") == of_service)
        assert worker.values("dsa_indexer_step") == {"worker": steps}
        (step,) = worker.points()["dsa_indexer_step"]
        assert 1e-5 < step.min <= step.max < 10


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_exemplars_lead_to_traces_that_are_kept_and_to_no_other(
    ratio: float, tmp_path: Path
) -> None:
    with measured(tmp_path, ratio=ratio, shape=SMALL) as (running, _, worker, service):
        traces = {int(attended_step(running), 16) for _ in range(4)}
        found: dict[Told, set[int]] = {worker: set(), service: set()}

        def collected(told: Told) -> float:
            """Values so far; exemplars are told once."""
            points = told.points().get("dsa_indexer_stage", [])
            found[told] |= {lead.trace_id for point in points for lead in point.exemplars}
            return sum(point.count for point in points)

        assert eventually(lambda: collected(worker) == 12)
        assert eventually(lambda: collected(service) == 16)
        for leads in found.values():
            assert leads <= traces
            assert bool(leads) is (ratio == 1.0)


def test_metrics_need_no_tracing(tmp_path: Path) -> None:
    told = Told("worker")
    with pair(tmp_path, shape=SMALL, metrics=told.metrics) as running:
        for _ in range(3):
            running.step()
        assert told.values("dsa_indexer_step") == {"worker": 3}
        assert "dsa_indexer_traces" not in told.points()


def test_every_metric_is_emitted_and_no_other(tmp_path: Path) -> None:
    """A pair in which everything happens that is counted."""
    with measured(tmp_path, shape=SMALL) as (running, _, worker, service):
        attended_step(running)
        running.session.found(a_finding(running))
        metrics = StepMetrics(service.metrics)
        metrics.found(a_finding(running))
        plan = pb.StepPlan(step=9, trace=pb.TraceContext(trace_id=b"1" * 16))
        metrics.step_finished(FinishedStep(plan, pb.StepReport(step=9, fault_count=2), None, []))
        assert eventually(lambda: service.values("dsa_indexer_stage"))
        for side, told in (("worker", worker), ("service", service)):
            expected = {metric.name for metric in METRICS if side in metric.sides}
            assert set(told.points()) == expected, side
            for metric in METRICS:
                for point in told.points().get(metric.name, []):
                    labels = [metric.label] if metric.label else []
                    assert list(point.attributes) == labels, metric.name


def test_names_begin_with_the_projects_and_counters_never_go_down() -> None:
    assert all(metric.name.startswith("dsa_indexer_") for metric in METRICS)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_docs_table_is_the_catalogue(repository: Path) -> None:
    text = (repository / "docs" / "tracing.md").read_text()
    cell = r" \| (.*?)"
    rows = re.findall(rf"^\| `(dsa_indexer_\w+)` \| (\w+){3 * cell} \|$", text, re.MULTILINE)
    assert rows == [
        (
            metric.prometheus_name,
            metric.kind.value,
            f"`{metric.label}`" if metric.label else "",
            ", ".join(metric.sides),
            metric.meaning,
        )
        for metric in METRICS
    ]
    assert {metric.kind for metric in METRICS} == set(Kind)
