"""A session of the test's own process, one random step after the other."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from indexer_client import ClientSettings, Session, Source
from indexer_client.attachment import Attachment
from tests.support.processes import ServiceProcess
from tests.support.waiting import SOON
from tests.support.workloads import Checker, RandomSteps, Shape

# Longer than a thread stands still, on most machines.
LONG_BOUND = 5.0


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

    def until_detached(self, bound: float | None = None) -> None:
        """Steps; waits end after `bound`, where nothing but a bound ends them."""
        before = self.session.statistics.detachments
        with self.waiting(bound or self.session.settings.wait_bound_seconds):
            self.until(lambda: self.session.statistics.detachments > before)

    def attached_steps(self) -> None:
        """Steps until two in a row have come from the service only.

        The first may not: where bounds are short, a moment's standstill ends an attachment, and
        one may be with a service that is frozen.
        """
        with self.waiting(LONG_BOUND):
            deadline, in_a_row = time.monotonic() + SOON, 0
            while in_a_row < 2:
                assert time.monotonic() < deadline, "not attached for two steps in a row"
                self.session.wait_attached(SOON)
                in_a_row = in_a_row + 1 if set(self.step()) == {Source.SERVICE} else 0

    def freeze_in_use(
        self, service: ServiceProcess, bound: float, moment: Callable[[], float]
    ) -> Attachment:
        """Freeze the service at a moment of its use; the attachment that ended by that.

        Args:
            bound: of the waits, which nothing else ends.
            moment: chooses when, in seconds from now.
        """
        while True:
            attachment = self.session._attachment
            assert attachment is not None
            timer = later(moment(), service.freeze)
            self.until_detached(bound)
            timer.join()
            if not attachment.bells.is_drained() and self.session._caretaker._held() is None:
                return attachment
            # A wait had ended before the service froze, which let go of the attachment.
            service.thaw()
            self.attached_steps()

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Waits for answers end after so long."""
        settings = self.session.settings
        bound, settings.wait_bound_seconds = settings.wait_bound_seconds, seconds
        try:
            yield
        finally:
            settings.wait_bound_seconds = bound


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
