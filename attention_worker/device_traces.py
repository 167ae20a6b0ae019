"""The worker's part of traced steps, looked at when the device is done with them."""

import logging
import queue
import threading
from dataclasses import dataclass

import torch

from attention_worker.captures import leave_captures_alone
from attention_worker.device_counts import DeviceCounts
from attention_worker.streams import new_event
from indexer_client.metrics import WorkerMetrics
from indexer_client.step import Begun
from indexer_client.worker_traces import EndedStep, WorkerTraces
from ipc_handoff.kernels.clock import HostsClock
from ipc_handoff.stamps import StepTimes, is_sample

logger = logging.getLogger(__name__)

_QUEUED = 256


class HostStamps:
    """The device's stamps as times of the host's clock."""

    def __init__(self, counts: DeviceCounts) -> None:
        self._counts = counts
        self._clock = HostsClock(counts.clock)

    def read(self, step: int) -> StepTimes | None:
        """Times [layers][WorkerStage] of a step that is over; None: overwritten, and counted."""
        times = self._counts.stamps(step)
        return None if times is None else self._clock.of(times)


@dataclass(frozen=True)
class _Enqueued:
    """done: recorded behind the step's last kernel; None: nobody waits for an inline step."""

    begun: Begun
    done: torch.cuda.Event | None


class DeviceTraces:
    """A step's kernels run long after the host has enqueued them: another thread waits for them.

    The thread begins with the first step. Steps that come faster than they are looked at are left
    out, and counted.

    Args:
        traces, metrics: what is told of steps; None: not wanted.
        stamps: of the worker; None: nothing is stamped.
    """

    def __init__(
        self,
        traces: WorkerTraces | None,
        metrics: WorkerMetrics | None,
        stamps: HostStamps | None,
    ) -> None:
        self._traces = traces
        self._metrics = metrics
        self._stamps = stamps
        self._open: Begun | None = None
        self._enqueued: queue.Queue[_Enqueued | None] = queue.Queue(_QUEUED)
        self._thread: threading.Thread | None = None
        self.lost = 0

    def begin_step(self, begun: Begun) -> None:
        """A step of which the forward comes now."""
        self._open = begun if begun.trace is not None or self._is_timed(begun) else None

    def end_step(self) -> None:
        """The forward of the step that was begun is enqueued; never waits."""
        begun, self._open = self._open, None
        if begun is None:
            return
        attachment, trace, done = begun.attachment, begun.trace, None
        if attachment is not None:
            if trace is not None:
                if attachment.detached_because:
                    trace.event("detached", {"dsa.reason": attachment.detached_because})
                    trace.keep()
                # If the service dies with its part of it, that is exported from the bank.
                attachment.remote_traces.add(begun.number, trace)
            done = new_event()
            done.record()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dsa-traces", daemon=True)
            self._thread.start()
        try:
            self._enqueued.put_nowait(_Enqueued(begun, done))
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Wait until all steps were looked at."""
        self.end_step()
        if self._thread is not None:
            self._enqueued.put(None)
            self._thread.join()
            self._thread = None

    def _is_timed(self, begun: Begun) -> bool:
        """Its stages go into the metrics."""
        has_stamps = self._stamps is not None and begun.attachment is not None
        return has_stamps and self._metrics is not None and is_sample(begun.number)

    def _run(self) -> None:
        leave_captures_alone()
        while (enqueued := self._enqueued.get()) is not None:
            try:
                if enqueued.done is not None:
                    enqueued.done.synchronize()
                self._look_at(enqueued.begun)
            except Exception:
                # Without this thread nothing is traced any more, and nobody would know why.
                logger.exception("step %d: not traced", enqueued.begun.number)

    def _look_at(self, begun: Begun) -> None:
        number, attachment, trace = begun
        if trace is not None and self._traces is not None:
            trace.end()
            # An inline step publishes nothing, and its kernels stamp nothing.
            is_stamped = attachment is not None
            self._traces.end(EndedStep(number, trace, attachment, is_stamped=is_stamped))
        if self._metrics is not None and self._stamps is not None and self._is_timed(begun):
            context = None if trace is None else trace.context
            self._metrics.step_ended(number, self._stamps.read(number), context)
