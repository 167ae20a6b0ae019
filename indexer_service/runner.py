"""One session's steps, on a thread of their own: take a plan, have it answered, report.

That thread is the only writer of the service's words of its attachment. When it ends, it says
so in the `drained` word: nothing of the attachment is touched after that.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import grpc

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.engine import Engine
from indexer_service.errors import ServiceError, exhausted, precondition
from indexer_service.events import StepObserver
from indexer_service.step_executor import Attachment, StepCancelled, StepExecutor
from ipc_handoff.errors import RingFull, RingLapped
from ipc_handoff.layout import MESSAGE_BYTES
from ipc_handoff.wakeups import Wakeup, sleep_until_any

logger = logging.getLogger(__name__)

OnReport = Callable[[pb.StepReport], None]

# An idle runner looks this often by itself; the wake-up is what makes it quick.
_IDLE_SECONDS = 0.5


def _sleep(wakeups: Sequence[Wakeup], seconds: float) -> None:
    """Sleep until somebody rings. Callers test their condition again afterwards."""
    sleep_until_any([wakeup.fileno() for wakeup in wakeups], seconds)
    for wakeup in wakeups:
        wakeup.clear()


@dataclass(frozen=True)
class RunnerSettings:
    """gate_bound_seconds: longest wait for one word; queued_steps: plans waiting at most."""

    gate_bound_seconds: float
    queued_steps: int


class StepRunner:
    """Runs the steps of one attachment.

    Plans come from the attachment's ring (if `use_ring`) and through `submit`.
    """

    def __init__(
        self,
        attachment: Attachment,
        engine: Engine,
        settings: RunnerSettings,
        *,
        use_ring: bool,
        observer: StepObserver | None = None,
    ) -> None:
        self._at = attachment
        self._bells = attachment.control.bells
        self._submit_wakeup = Wakeup()
        self._closing = threading.Event()
        # What the executor is given does not lead back to the runner: together they hold the
        # session's memory, and in a cycle they would hold it until the collector comes by.
        self._sleep = partial(_sleep, (attachment.wake_service, self._submit_wakeup))
        self._executor = StepExecutor(
            attachment, engine, settings.gate_bound_seconds, self._sleep, self._closing.is_set
        )
        self._settings = settings
        self._use_ring = use_ring
        self._observer = observer
        self._submitted: deque[tuple[pb.StepPlan, OnReport]] = deque()
        self._submit_lock = threading.Lock()
        self._finishing = False
        self._close_lock = threading.Lock()
        # `quiesced` takes both, the runner the first one only in passing: it cannot starve them.
        self._turnstile = threading.Lock()
        self._step_lock = threading.Lock()
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
        return self._at.control.service_stamps.lost

    @property
    def queued_steps(self) -> int:
        """Submitted plans that were not taken yet."""
        return len(self._submitted)

    @property
    def ended(self) -> bool:
        """The worker detached or the runner was closed: no step will run any more."""
        return not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, plan: pb.StepPlan, on_report: OnReport) -> None:
        """Queue a plan. `on_report` is called once, from the runner's thread.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED with too many plans waiting, FAILED_PRECONDITION
                once the attachment has ended.
        """
        with self._submit_lock:
            if self._finishing or self.ended:
                raise precondition("session_id", "the attachment has ended", "open a new session")
            if len(self._submitted) >= self._settings.queued_steps:
                raise exhausted(
                    "plan", f"{len(self._submitted)} plans are waiting", "wait for their reports"
                )
            self._submitted.append((plan, on_report))
            self._submit_wakeup.ring()

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """No step runs inside: for changing what steps read."""
        with self._turnstile, self._step_lock:
            yield

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
        try:
            while (taken := self._next_plan()) is not None:
                with self._turnstile:
                    pass
                with self._step_lock:
                    self._run_step(*taken)
        except RingLapped as error:
            logger.error("epoch %d: the plan ring is broken: %s", self._at.epoch, error)
        finally:
            self._refuse_waiting_plans()
            self._bells.drained()
            self._at.wake_worker.ring()

    def _next_plan(self) -> tuple[pb.StepPlan, OnReport] | None:
        """The next plan; None when the attachment ends."""
        while not self._closing.is_set() and not self._bells.is_detached():
            if self._submitted:
                return self._submitted.popleft()
            payload = self._at.control.plans.take() if self._use_ring else None
            if payload is not None:
                plan = self._parse(payload)
                if plan is not None:
                    return plan, self._post_report
            elif self._finishing:
                return None
            else:
                self._sleep(_IDLE_SECONDS)
        return None

    def _parse(self, payload: bytes) -> pb.StepPlan | None:
        try:
            return pb.StepPlan.FromString(payload)
        except Exception:
            # The checksum held, so the worker wrote this: its wait ends by its bound.
            logger.exception("epoch %d: a plan that cannot be parsed", self._at.epoch)
            return None

    def _run_step(self, plan: pb.StepPlan, on_report: OnReport) -> None:
        began = time.monotonic_ns()
        report = pb.StepReport(step=plan.step, epoch=self._at.epoch)
        try:
            self._executor.answer(plan, report)
            report.status = pb.STEP_STATUS_ANSWERED
            self.answered_steps += 1
        except ServiceError as error:
            report.status = pb.STEP_STATUS_REJECTED
            self._give_up(report, error.code, str(error))
        except StepCancelled as error:
            report.status = pb.STEP_STATUS_CANCELLED
            self._give_up(report, grpc.StatusCode.CANCELLED, str(error))
        except Exception as error:
            logger.exception("epoch %d, step %d: the engine failed", self._at.epoch, plan.step)
            report.status = pb.STEP_STATUS_FAILED
            self._give_up(report, grpc.StatusCode.INTERNAL, f"engine: {error}")
        self.faulted_rows += report.fault_count
        report.duration_ns = time.monotonic_ns() - began
        on_report(report)
        self._tell_observer(plan, report)

    def _give_up(self, report: pb.StepReport, code: grpc.StatusCode, message: str) -> None:
        report.code = code.value[0]
        report.message = message.encode()[:MESSAGE_BYTES].decode(errors="ignore")
        if report.status != pb.STEP_STATUS_REJECTED:
            self.cancelled_steps += 1
        self._bells.cancel(report.step)
        self._at.wake_worker.ring()

    def _post_report(self, report: pb.StepReport) -> None:
        try:
            self._at.control.reports.post(report.SerializeToString())
        except RingFull:
            # Reports inform; a worker that does not read them still gets its answers.
            self.lost_reports += 1

    def _tell_observer(self, plan: pb.StepPlan, report: pb.StepReport) -> None:
        # After detachment the worker exports this step's stages itself, as incomplete.
        if self._observer is None or self._bells.is_detached():
            return
        times = None
        if report.status != pb.STEP_STATUS_REJECTED:  # then its number may be another step's
            times = self._at.control.service_stamps.read(plan.step)
        try:
            self._observer.step_finished(plan, report, times, self._at.geometry.layers)
        except Exception:
            logger.exception("epoch %d, step %d: the observer failed", self._at.epoch, plan.step)

    def _refuse_waiting_plans(self) -> None:
        with self._submit_lock:
            self._finishing = True
        while self._submitted:
            plan, on_report = self._submitted.popleft()
            report = pb.StepReport(
                step=plan.step, epoch=self._at.epoch, status=pb.STEP_STATUS_CANCELLED
            )
            self._give_up(report, grpc.StatusCode.CANCELLED, "the session is closing")
            on_report(report)
