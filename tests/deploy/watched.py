"""A service and a worker, two processes, watched by an OTLP receiver and by Prometheus.

One run for all tests: clean steps, a race, a service that freezes in the middle of a step.
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from indexer_client import Session
from ipc_handoff.stages import SERVICE_SPANS, WORKER_SPANS
from tests.deploy.observability import metric_queries
from tests.deploy.prometheus import LONG, Prometheus, scraping
from tests.support.loopback import free_port, metrics_text
from tests.support.otlp import Receiver
from tests.support.plants import patient_client
from tests.support.processes import ServiceProcess
from tests.support.waiting import SOON, eventually
from tests.support.workloads import Case, RandomSteps, Shape

SHAPE = Shape(layers=(1, 2), requests=2)
STAGES = len(WORKER_SPANS) + len(SERVICE_SPANS)
CLEAN_STEPS = 5
RACE = "torn_input"
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclass
class Watched:
    """What was seen of the run, which is over.

    Attributes:
        clean: numbers of steps in which nothing happened.
        torn, lost, last: of the one that raced, of the one that lost its service, and of the last
            one, which had none.
        text: what each side's port said, by side.
        series: what Prometheus answered to every panel; None: there was no Prometheus.
        alerts: that fired for the race.
        status: of the service, which was asked to end.
    """

    receiver: Receiver
    clean: list[int]
    torn: int
    lost: int
    last: int
    text: dict[str, str]
    series: dict[str, list[dict[str, Any]]] | None
    alerts: list[dict[str, Any]]
    status: int | None


def watch(folder: Path) -> Watched:
    """Run them; none is left, and the environment is as it was."""
    receiver, steps = Receiver(), RandomSteps(SHAPE, 1)
    endpoint = f"http://127.0.0.1:{receiver.port}"
    service = None
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith(("OTEL_", "DSA_INDEXER_"))]:
            environment.delenv(name)
        try:
            port = free_port()
            socket = folder / "d" / "i.sock"
            service = ServiceProcess(
                socket,
                prepare=partial(_send_to, endpoint),
                metrics_port=port,
                gate_bound_seconds=SOON,
            )
            # Not before: a process that others are forked from would keep it.
            environment.setenv(_ENDPOINT, endpoint)
            return _run(folder, receiver, service, port, steps)
        finally:
            if service is not None:
                service.kill()
            receiver.close()
            steps.close()


def _send_to(endpoint: str) -> None:
    """In the service's process, before it starts."""
    os.environ[_ENDPOINT] = endpoint


def _run(
    folder: Path, receiver: Receiver, service: ServiceProcess, port: int, steps: RandomSteps
) -> Watched:
    settings = patient_client(service.address, worker_metrics_port=0)
    run = _Steps(steps)
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
        session.wait_attached(LONG)
        assert session._metrics is not None
        own = session._metrics._metrics.port
        assert own is not None
        ports = {"dsa-indexer-service": port, "dsa-indexer-worker": own}
        with scraping(_made(folder / "prometheus"), ports) as prometheus:
            # A rate sees what happened only if its series was seen before: both sides, and the
            # stages of a first step.
            _await(prometheus, f'count(dsa_indexer_findings_total{{kind="{RACE}"}})', 2)
            clean = [run.step(session)]
            _await(prometheus, "count(dsa_indexer_stage_seconds_count)", STAGES)
            clean += [run.step(session) for _ in range(CLEAN_STEPS - 1)]
            _await(prometheus, 'sum(dsa_indexer_steps_total{status="answered"})', CLEAN_STEPS)
            torn = run.step(session, torn=True)
            while not session.statistics.faulted_rows:  # the worker reads it with a later step
                clean.append(run.step(session))
            alerts = _fired(prometheus)
            lost = run.lose(session, service)
            _await(prometheus, 'dsa_indexer_layers_total{source="inline"}', 1)
            _await(prometheus, "dsa_indexer_detachments_total", 1)
            _await(prometheus, 'up{job="dsa-indexer-service"}', 1)
            series = prometheus and {
                asked.where: prometheus.query(asked.expression) for asked in metric_queries()
            }
        text = {"service": metrics_text(port), "worker": metrics_text(own)}
        session.wait_attached(LONG)
        clean.append(run.step(session))
        status = service.stop()
        while session.epoch is not None:
            run.step(session)
        last = run.step(session)
    return Watched(receiver, clean, torn, lost, last, text, series, alerts, status)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _await(prometheus: Prometheus | None, expression: str, least: float) -> None:
    if prometheus is not None:
        assert eventually(lambda: prometheus.value(expression) >= least, LONG), expression


def _fired(prometheus: Prometheus | None) -> list[dict[str, Any]]:
    """Alerts for the race, once both sides have told it."""
    if prometheus is None:
        return []
    assert eventually(lambda: len(prometheus.firing("DsaIndexerRace")) == 2, LONG)
    return prometheus.firing("DsaIndexerRace")


class _Steps:
    """Whole steps with attention, whose requests have names."""

    def __init__(self, steps: RandomSteps) -> None:
        self._steps, self._number = steps, 0

    def _case(self) -> Case:
        self._number += 1
        case = self._steps.case(self._number)
        names = [f"chat-{number}" for number in range(case.inputs.requests)]
        return replace(case, inputs=replace(case.inputs, request_ids=names))

    def step(self, session: Session, *, torn: bool = False) -> int:
        """Its number. Torn: what the device has is not what the plan says."""
        case = self._case()
        inputs = case.inputs
        if torn:
            lengths = inputs.seq_lens.clone()
            lengths[0] -= 1
            inputs = replace(inputs, seq_lens=lengths, exact_seq_lens=inputs.seq_lens.tolist())
        with session.step(inputs, case.layers) as step:
            for layer in case.layers:
                _select(step, case, layer)
                with step.attending(layer):
                    pass
        return step.number

    def lose(self, session: Session, service: ServiceProcess) -> int:
        """A step whose service freezes behind its first layer."""
        case = self._case()
        first, *others = case.layers
        with session.step(case.inputs, case.layers) as step:
            _select(step, case, first)
            service.freeze()
            assert eventually(lambda: _stands_still(service.pid))
            step._wait_bound = 0.2
            for layer in others:
                _select(step, case, layer)
        service.thaw()
        assert session.statistics.inline_layers
        return step.number


def _stands_still(pid: int) -> bool:
    """A thread that runs at the signal's moment goes on for a little."""
    stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def _select(step: Any, case: Case, layer: int) -> None:
    query = case.queries[layer]
    step.select(layer, query.q, query.weights, out=torch.empty_like(case.expected[layer]))
