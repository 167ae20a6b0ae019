"""A session of the test's own process, one random step after the other."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from indexer_client import ClientSettings, Session, Source
from tests.support.workloads import Checker, RandomSteps, Shape

# Longest wait of a test for what should take milliseconds, on a machine with other work.
SOON = 10.0


class Run:
    """A session of this process, one step after the other."""

    def __init__(self, session: Session, steps: RandomSteps) -> None:
        self.session, self._steps = session, steps
        self.checker = Checker()
        self.number = 0
        self.slowest = 0.0

    def step(self) -> list[Source]:
        """Where the layers of one more step came from."""
        case = self._steps.case(self.number, all_layers=False)
        self.number += 1
        began = time.monotonic()
        with self.session.step(case.inputs, case.layers) as step:
            self.checker.run(step, case)
        self.slowest = max(self.slowest, time.monotonic() - began)
        return self.checker.last

    def until(self, condition: Callable[[], bool], seconds: float = SOON) -> None:
        """Steps until something is so."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "did not come about"
            self.step()

    def until_detached(self) -> None:
        before = self.session.statistics.detachments
        self.until(lambda: self.session.statistics.detachments > before)

    def attached_steps(self, seconds: float) -> None:
        """Attached within `seconds`; then steps from the service only."""
        began = time.monotonic()
        self.session.wait_attached(seconds)
        assert time.monotonic() - began < seconds
        for _ in range(2):
            assert set(self.step()) == {Source.SERVICE}


@contextmanager
def running(settings: ClientSettings, seed: int) -> Iterator[Run]:
    steps = RandomSteps(Shape.random(seed), seed)
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
        yield Run(session, steps)
    steps.close()


def later(seconds: float, action: Callable[[], object]) -> Timer:
    timer = Timer(seconds, action)
    timer.start()
    return timer
