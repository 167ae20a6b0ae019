"""Mixes of decode, several tokens a request and prefill, for many workers at once."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pytest
import torch

from indexer_client import ClientSettings, Session, Source
from tests.e2e.conftest import Start
from tests.support.processes import nothing_mapped
from tests.support.waiting import SOON, eventually
from tests.support.workloads import Checker, RandomSteps, Shape

# Far more than any step takes, also on a busy machine.
LONGEST_STEP = SOON


@pytest.mark.parametrize("seed", range(6))
def test_ring_and_stream_select_the_same_bytes(
    seed: int, start: Start, client_settings: ClientSettings
) -> None:
    start()
    answers: dict[str, list[torch.Tensor]] = {}
    for signalling in ("ring", "stream"):
        steps, checker = RandomSteps(Shape.random(seed), seed), Checker()
        settings = client_settings.model_copy(update={"signalling": signalling})
        with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
            session.wait_attached(SOON)
            found = answers.setdefault(signalling, [])
            for number in range(25):
                case = steps.case(number, all_layers=False)
                with session.step(case.inputs, case.layers) as step:
                    found += checker.run(step, case)
        checker.assert_right()
        assert {source for step in checker.sources for source in step} == {Source.SERVICE}
        assert session.statistics.rejected_steps == session.statistics.faulted_rows == 0
        steps.close()
    assert len(answers["ring"]) == len(answers["stream"])
    for ring, stream in zip(answers["ring"], answers["stream"], strict=True):
        assert torch.equal(ring, stream)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_any_number_of_slots_serves_a_long_run(
    slots: int, start: Start, client_settings: ClientSettings
) -> None:
    start()
    steps, checker = RandomSteps(Shape(slots=slots), 77 + slots), Checker()
    with Session(
        steps.geometry, steps.k_caches, steps.fallback, settings=client_settings
    ) as session:
        session.wait_attached(SOON)
        for number in range(150):  # more than a ring of plans or stamps holds
            case = steps.case(number, decode_only=True)
            with session.step(case.inputs, case.layers) as step:
                checker.run(step, case)
    checker.assert_right()
    assert session.statistics.answered_layers == 150 * len(steps.shape.layers)
    steps.close()


def test_a_step_of_one_request_after_a_wide_one_reads_nothing_old(
    start: Start, client_settings: ClientSettings
) -> None:
    """With one slot, the larger step before stands in the same staging memory."""
    start()
    steps, checker = RandomSteps(Shape(requests=5, slots=1), 5), Checker()
    cases = [(number, len(steps.case(number).inputs.seq_lens)) for number in range(40)]
    wide = [number for number, requests in cases if requests == 5]
    narrow = [number for number, requests in cases if requests == 1]
    with Session(
        steps.geometry, steps.k_caches, steps.fallback, settings=client_settings
    ) as session:
        session.wait_attached(SOON)
        for pair in zip(wide, narrow, strict=False):
            for number in pair:
                case = steps.case(number)
                with session.step(case.inputs, case.layers) as step:
                    checker.run(step, case)
    assert len(checker.sources) >= 4
    checker.assert_right()
    steps.close()


class _Crowd:
    """Workers, each with a geometry and a thread of its own."""

    def __init__(self, seed: int, settings: ClientSettings) -> None:
        self._seed, self._settings = seed, settings
        self.checkers: list[Checker] = []
        self.slowest = 0.0
        self.failures: list[BaseException] = []
        self._lock = threading.Lock()

    def steady(self, number: int, seconds: float) -> None:
        """One session that runs all the time."""
        self._guarded(lambda: self._run(self._seed + number, time.monotonic() + seconds))

    def restless(self, number: int, seconds: float) -> None:
        """Sessions one after the other, each of a few steps."""
        end = time.monotonic() + seconds

        def work() -> None:
            life = 0
            while time.monotonic() < end:
                life += 1
                self._run(self._seed + 1000 * number + life, end, steps=5)

        self._guarded(work)

    def _guarded(self, work: Callable[[], None]) -> None:
        torch.set_num_threads(1)
        try:
            work()
        except BaseException as error:
            self.failures.append(error)

    def _run(self, seed: int, end: float, steps: int = 10_000) -> None:
        work, checker = RandomSteps(Shape.random(seed), seed), Checker()
        with Session(
            work.geometry, work.k_caches, work.fallback, settings=self._settings
        ) as session:
            session.wait_attached(SOON)
            for number in range(steps):
                case = work.case(number, all_layers=False)
                began = time.monotonic()
                with session.step(case.inputs, case.layers) as step:
                    checker.run(step, case)
                with self._lock:
                    self.slowest = max(self.slowest, time.monotonic() - began)
                if time.monotonic() > end:
                    break
        work.close()
        with self._lock:
            self.checkers.append(checker)


def _together(crowd: _Crowd, works: Sequence[Callable[[int, float], None]], seconds: float) -> None:
    """Run every work in a thread of its own; what fails in one fails here."""
    threads = [
        threading.Thread(target=work, args=(number, seconds)) for number, work in enumerate(works)
    ]
    with ExitStack() as ended:
        for thread in threads:
            thread.start()
            ended.callback(thread.join, 4 * SOON)
    assert not any(thread.is_alive() for thread in threads)
    if crowd.failures:
        raise crowd.failures[0]


def _silence_keep_alives(patch: pytest.MonkeyPatch, share: random.Random) -> None:
    """One call in two is never made, so that leases run out while steps run."""
    from indexer_client.attachment import Attachment

    renew = Attachment.keep_alive

    def sometimes(attachment: Attachment) -> None:
        if share.random() < 0.5:
            renew(attachment)

    patch.setattr(Attachment, "keep_alive", sometimes)


def test_eight_workers_at_once_are_all_answered_by_the_service(
    start: Start, client_settings: ClientSettings, moments: random.Random
) -> None:
    service = start()
    crowd = _Crowd(moments.randrange(2**20), client_settings)
    _together(crowd, [crowd.steady] * 8, seconds=4.0)
    assert len(crowd.checkers) == 8
    for checker in crowd.checkers:
        checker.assert_right()
        assert {source for step in checker.sources for source in step} == {Source.SERVICE}
    assert eventually(lambda: nothing_mapped(service))


def test_eight_workers_of_different_geometries_while_sessions_come_and_go(
    start: Start,
    client_settings: ClientSettings,
    moments: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = start(lease_seconds=0.9)
    _silence_keep_alives(monkeypatch, moments)
    crowd = _Crowd(moments.randrange(2**20), client_settings)
    _together(crowd, [crowd.steady] * 6 + [crowd.restless] * 2, seconds=8.0)
    for checker in crowd.checkers:
        checker.assert_right()
    assert len(crowd.checkers) > 8
    sources = [s for checker in crowd.checkers for step in checker.sources for s in step]
    # Leases end now and then, all of them where the machine stands still; most of the work is the
    # service's.
    assert sources.count(Source.SERVICE) > 0.3 * len(sources)
    assert crowd.slowest < LONGEST_STEP
    assert eventually(lambda: nothing_mapped(service))
