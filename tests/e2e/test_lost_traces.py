"""A killed service takes no stage of any step along: what had not left it, the worker exports."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsa_indexer_cli.trace.spans import Span, read_trace_file
from indexer_client import ClientSettings, Session, Source
from ipc_handoff.stages import SERVICE_SPANS
from tests.e2e.conftest import Start
from tests.support.plants import pair
from tests.support.processes import ServiceProcess
from tests.support.traces import traced
from tests.support.waiting import SOON, eventually
from tests.support.workloads import Checker, RandomSteps, Shape

SHAPE = Shape(layers=(1, 2, 3))
STEPS = 6


class _Worker:
    """Runs steps and remembers their traces."""

    def __init__(self, session: Session, steps: RandomSteps) -> None:
        self.session, self._steps = session, steps
        self.checker = Checker()
        self.answered: list[str] = []

    def step(self) -> None:
        case = self._steps.case(len(self.checker.sources))
        with self.session.step(case.inputs, case.layers) as step:
            self.checker.run(step, case)
        if set(self.checker.last) == {Source.SERVICE}:
            self.answered.append(step.trace_id)


@contextmanager
def _traced(
    start: Start, settings: ClientSettings, folder: Path
) -> Iterator[tuple[ServiceProcess, _Worker, tuple[Path, Path]]]:
    """A service, and a worker that has run `STEPS` steps with it; the trace files of worker and
    service."""
    files = folder / "worker.jsonl", folder / "service.jsonl"
    service = start(trace_file=str(files[1]))
    settings = settings.model_copy(update={"trace_file": files[0]})
    steps = RandomSteps(SHAPE, 1)
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
        session.wait_attached(SOON)
        worker = _Worker(session, steps)
        for _ in range(STEPS):
            worker.step()
        yield service, worker, files


def _service_stages(*files: Path) -> dict[str, Counter[tuple[str, int]]]:
    """How often each stage of each layer was exported, by trace."""
    names = {span.name for span in SERVICE_SPANS}
    found: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
    for span in _spans(*files):
        if span.name in names:
            key = span.name, span.attributes["dsa.layer"]
            found[span.trace][key] += 1
    return found


def _spans(*files: Path) -> list[Span]:
    return [span for file in files for span in read_trace_file(file).spans]


WHOLE = Counter((span.name, layer) for span in SERVICE_SPANS for layer in SHAPE.layers)


@pytest.mark.parametrize("then", ["a step", "the end", "frozen first"])
@pytest.mark.parametrize("signalling", ["ring", "stream"])
def test_every_stage_of_answered_steps_is_told_though_the_service_was_killed(
    signalling: str, then: str, start: Start, client_settings: ClientSettings, tmp_path: Path
) -> None:
    """Twice where the kill came between a span's leaving and the word about it."""
    settings = client_settings.model_copy(update={"signalling": signalling})
    with _traced(start, settings, tmp_path) as (service, worker, files):
        if then == "frozen first":
            service.freeze()
            worker.session.settings.wait_bound_seconds = 0.3
            worker.step()
        service.kill()
        if then == "a step":
            worker.step()
    worker.checker.assert_right()
    assert len(worker.answered) == STEPS
    stages = _service_stages(*files)
    for trace in worker.answered:
        assert stages[trace].keys() == WHOLE.keys()
        assert max(stages[trace].values()) <= 2


def test_what_has_left_the_service_is_not_told_again(
    start: Start, client_settings: ClientSettings, tmp_path: Path
) -> None:
    with _traced(start, client_settings, tmp_path) as (service, worker, files):
        attachment = worker.session._attachment
        assert attachment is not None
        assert eventually(lambda: attachment.bells.is_exported(STEPS))
        assert _service_stages(files[1]) == {trace: WHOLE for trace in worker.answered}
        service.kill()
        worker.step()
    assert _service_stages(*files) == {trace: WHOLE for trace in worker.answered}


def test_a_service_that_stops_in_good_order_tells_everything_itself(
    start: Start, client_settings: ClientSettings, tmp_path: Path
) -> None:
    with _traced(start, client_settings, tmp_path) as (service, worker, files):
        assert service.stop() == 0
        worker.step()
    assert _service_stages(files[1]) == {trace: WHOLE for trace in worker.answered}
    assert not [s for s in _spans(files[0]) if s.attributes.get("dsa.incomplete")]


def test_stamps_that_a_dead_service_overwrote_are_counted(tmp_path: Path) -> None:
    with traced(tmp_path) as (running, _):
        running.step()
        attachment = running.session._attachment
        assert attachment is not None
        assert eventually(lambda: attachment.bells.is_exported(1))
        attachment.bank.control.service_stamps.begin(129)
        attachment.bank.control.bells._exported._words.store(0, 1)  # as if it had not left
        before = running.session.statistics.lost_stamps
        attachment._export_lost()
        assert running.session.statistics.lost_stamps == before + 1


def test_without_tracing_nothing_is_kept(tmp_path: Path) -> None:
    with pair(tmp_path) as running:
        running.step()
        attachment = running.session._attachment
        assert attachment is not None
        assert not attachment.remote_traces._steps
        assert not attachment.bells.is_exported(1)
