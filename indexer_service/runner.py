"""One session's steps, on a thread of their own: take a plan, have it answered, report.

An executor may have several steps in flight; they are reported as they end. That thread is the
only writer of the service's words of its attachment. When it ends, it says so in the `drained`
word: nothing of the attachment is touched after that.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.attachment import Attachment
from indexer_service.errors import precondition
from indexer_service.events import FinishedStep, StepObserver, tell
from indexer_service.executor import DeviceLost, Executor, StepCancelled
from indexer_service.plan_queue import OnReport, PlanQueue
from indexer_service.running_step import RunningStep
from indexer_service.threads import sleep_until_rung
from ipc_handoff.errors import RingFull, RingLapped
from ipc_handoff.telemetry.attributes import Times
from ipc_handoff.wakeups import Wakeup

logger = logging.getLogger(__name__)

MakeExecutor = Callable[[Callable[[float], None], Callable[[], bool]], Executor]
"""Given how to sleep until somebody rings, and whether the service wants steps to end."""

# An idle runner looks this often by itself; the wake-up is what makes it quick.
_IDLE_SECONDS = 0.5
# Nobody rings when a step in flight ends.
_IN_FLIGHT_SECONDS = 0.001


@dataclass(frozen=True)
class RunnerSettings:
    """gate_bound_seconds: longest wait for one word; queued_steps: plans waiting at most."""

    gate_bound_seconds: float
    queued_steps: int


class StepRunner:
    """Runs the steps of one attachment.

    Plans come from the attachment's ring (if `use_ring`) and through `submit`.

    Args:
        on_device_lost: called once, from the runner's thread, when the GPU's context is gone.
    """

    def __init__(
        self,
        attachment: Attachment,
        make_executor: MakeExecutor,
        settings: RunnerSettings,
        *,
        use_ring: bool,
        observer: StepObserver | None = None,
        on_device_lost: Callable[[], None] | None = None,
    ) -> None:
        self._at = attachment
        self._bells = attachment.control.bells
        self._submit_wakeup = Wakeup()
        self._closing = threading.Event()
        # What the executor is given does not lead back to the runner: together they hold the
        # session's memory, and in a cycle they would hold it until the collector comes by.
        self._sleep = partial(sleep_until_rung, (attachment.wake_service, self._submit_wakeup))
        self._executor = make_executor(self._sleep, self._closing.is_set)
        self._observer = observer
        self._tell = partial(tell, observer, attachment.epoch)
        self._on_device_lost = on_device_lost
        ring = attachment.control.plans if use_ring else None
        self._plans = PlanQueue(ring, settings.queued_steps, attachment.epoch)
        self._submit_lock = threading.Lock()
        self._finishing = False
        self._is_lost = False
        self._close_lock = threading.Lock()
        # `quiesced` takes both, the runner the first one only in passing: it cannot starve them.
        # The runner holds the second one while a step is in flight.
        self._turnstile = threading.Lock()
        self._step_lock = threading.Lock()
        self._in_flight: deque[RunningStep] = deque()
        self._worked_at = 0.0
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"steps-{attachment.epoch}", daemon=True
        )
        self.answered_steps = 0
        self.cancelled_steps = 0
        self.faulted_rows = 0
        self.lost_reports = 0

    @property
    def last_step(self) -> int:
        """The newest step taken; 0 before the first."""
        return self._executor.last_step

    @property
    def lost_stamps(self) -> int:
        """Steps whose stage stamps were overwritten before the observer was told."""
        return self._executor.lost_stamps

    @property
    def queued_steps(self) -> int:
        """Submitted plans that were not taken yet."""
        return self._plans.submitted

    @property
    def ended(self) -> bool:
        """The worker detached or the runner was closed: no step will run any more."""
        return not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def wait_until_ready(self, seconds: float) -> bool:
        """Whether what the first step needs is made, or the runner has ended."""
        return self._ready.wait(seconds)

    def submit(self, plan: pb.StepPlan, on_report: OnReport) -> None:
        """Queue a plan. `on_report` is called once, from the runner's thread.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED with too many plans waiting, FAILED_PRECONDITION
                once the attachment has ended.
        """
        with self._submit_lock:
            if self._finishing or self.ended:
                raise precondition("session_id", "the attachment has ended", "open a new session")
            self._plans.submit(plan, on_report)
            self._submit_wakeup.ring()

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """No step runs inside: for changing what steps read."""
        with self._turnstile, self._step_lock:
            try:
                yield
            finally:
                self._executor.regions_changed()

    def close(self, *, finish: bool = False) -> int:
        """End the runner; returns how many steps that cancelled.

        Args:
            finish: first run the steps whose plans have arrived (each still under its gates'
                bounds). Otherwise a running step is cancelled, also while another thread waits
                here for it to finish.
        """
        before = self.cancelled_steps
        with self._submit_lock:
            self._finishing = True
            if not finish:
                self._closing.set()
                self._executor.interrupt()
            if not self.ended:
                self._submit_wakeup.ring()
        with self._close_lock:
            if self._thread.is_alive():
                self._thread.join()
            with self._submit_lock:
                self._submit_wakeup.close()
        return self.cancelled_steps - before

    # The thread.

    def _run(self) -> None:
        self._tell("attached", lambda observer: observer.attached(self._at))
        try:
            with self._step_lock:
                self._executor.prepare()
            self._ready.set()
            self._run_steps()
        except RingLapped as error:
            logger.error("epoch %d: the plan ring is broken: %s", self._at.epoch, error)
        except StepCancelled as error:
            logger.info("epoch %d: ends before its first step: %s", self._at.epoch, error)
        except DeviceLost as error:
            self._lost(error)
        except Exception:
            logger.exception("epoch %d: its steps end", self._at.epoch)
        finally:
            self._ready.set()
            self._end()

    def _run_steps(self) -> None:
        """Until the attachment ends."""
        while True:
            self._report_finished()
            if self._closing.is_set() or self._bells.is_detached():
                return
            if self._may_begin():
                taken = self._plans.next()
                if taken is not None:
                    self._begin(*taken)
                    continue
                if not self._in_flight:
                    if self._finishing:
                        return
                    if self._prepare_more():
                        continue
            self._pause()

    def _prepare_more(self) -> bool:
        with self._turnstile:
            pass
        with self._step_lock:
            return self._executor.prepare_more()

    def _end(self) -> None:
        try:
            self._drain()
            try:
                self._refuse_waiting_plans()
            finally:
                self._executor.close()
        except DeviceLost as error:
            self._lost(error)
        except Exception:
            logger.exception("epoch %d: could not end in order", self._at.epoch)
        finally:
            self._tell("ended", lambda observer: observer.ended(self._at.epoch))
            # Whatever happened, this thread launches nothing more, and what it launched is done or
            # gone with the GPU: the worker must not wait for more.
            self._bells.drained()
            self._at.wake_worker.ring()

    def _drain(self) -> None:
        try:
            self._executor.drain()
            self._report_finished()
        except Exception as error:
            self._lost(error)
            while self._in_flight:  # nothing of them runs any more
                self._report_next(error)

    def _lost(self, error: Exception) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        logger.critical("epoch %d: its GPU is lost", self._at.epoch, exc_info=error)
        if self._on_device_lost is not None:
            self._on_device_lost()

    def _may_begin(self) -> bool:
        """Whoever waits in `quiesced` lets no further step begin beside those in flight."""
        if not self._in_flight:
            return True
        return len(self._in_flight) < self._executor.most_in_flight and not self._turnstile.locked()

    def _pause(self) -> None:
        if time.monotonic() - self._worked_at < self._executor.spin_seconds:
            time.sleep(0)  # gives Python's lock to whoever waits for it
        else:
            self._sleep(_IN_FLIGHT_SECONDS if self._in_flight else _IDLE_SECONDS)

    def _begin(self, plan: pb.StepPlan, on_report: OnReport | None) -> None:
        if not self._in_flight:
            with self._turnstile:
                pass
            self._step_lock.acquire()
        step = RunningStep(plan, on_report or self._post_report, self._at.epoch)
        # Also what is refused, or fails at once, is reported behind the steps before it.
        self._in_flight.append(step)
        try:
            step.begun = self._executor.begin(plan, step.report)
        except Exception as error:
            self._conclude(step, error)
            if isinstance(error, DeviceLost):
                raise
        self._worked_at = time.monotonic()

    def _report_finished(self) -> None:
        while self._in_flight:
            begun = self._in_flight[0].begun
            if begun is not None and not begun.is_finished():
                return
            self._report_next()

    def _report_next(self, ended: Exception | None = None) -> None:
        """Report the oldest step in flight. `ended`: it did so, and is not to be finished."""
        step = self._in_flight[0]
        if step.begun is not None:
            # No name but the handler's for an error of `finish`: an error leads to this frame, and
            # the frame's names would lead back to it, and hold the session's memory.
            try:
                if ended is None:
                    step.begun.finish()
            except Exception as error:
                self._conclude(step, error)
            else:
                self._conclude(step, ended)
        self._in_flight.popleft()
        self.faulted_rows += step.report.fault_count
        step.tell()
        self._tell_observer(step)
        self._worked_at = time.monotonic()
        if not self._in_flight:
            self._step_lock.release()

    def _conclude(self, step: RunningStep, error: Exception | None) -> None:
        step.conclude(error)
        status = step.report.status
        if status == pb.STEP_STATUS_ANSWERED:
            self.answered_steps += 1
            return
        if status != pb.STEP_STATUS_REJECTED:
            self.cancelled_steps += 1
        self._executor.give_up(step.report.step)

    def _post_report(self, report: pb.StepReport) -> None:
        try:
            self._at.control.reports.post(report.SerializeToString())
        except RingFull:
            # Reports inform; a worker that does not read them still gets its answers.
            self.lost_reports += 1

    def _tell_observer(self, step: RunningStep) -> None:
        if self._observer is None:
            return
        times: Times | None = ()
        # The number of a plan that was refused may be another step's.
        if step.begun is not None and step.report.status != pb.STEP_STATUS_REJECTED:
            times = step.begun.times()
        finished = FinishedStep(step.plan, step.report, times, self._at.geometry.layers)
        self._tell(f"step {step.plan.step}", lambda observer: observer.step_finished(finished))

    def _refuse_waiting_plans(self) -> None:
        """Those in the ring too: their worker would wait for its whole bound otherwise."""
        with self._submit_lock:
            self._finishing = True
        newest = 0
        for plan, on_report in self._plans.take_all():
            step = RunningStep(plan, on_report or self._post_report, self._at.epoch)
            step.conclude(StepCancelled("the session is closing"))
            self.cancelled_steps += 1
            newest = max(newest, plan.step)
            step.tell()
        if newest > self.last_step:
            self._executor.give_up(newest)
