"""The worker's part of traced steps, exported when the device is done with them."""

import logging
import queue
import threading
import time
from dataclasses import dataclass

import torch

from attention_worker.captures import leave_captures_alone
from attention_worker.device_counts import DeviceCounts
from attention_worker.streams import new_event
from indexer_client.step import Begun
from indexer_client.telemetry import end_step
from ipc_handoff.kernels.clock import ClockOffset, on_the_hosts_clock
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.tracing import StepTrace

logger = logging.getLogger(__name__)

_QUEUED = 256
_CLOCK_SECONDS = 1.0
"""The two clocks run apart: they are looked at anew so often."""


@dataclass(frozen=True)
class _Ended:
    """done: recorded behind the step's last kernel."""

    trace: StepTrace
    step: int
    epoch: int
    done: torch.cuda.Event


class StepTraces:
    """A step's kernels run long after the host has enqueued them: another thread waits for them.

    The thread begins with the first traced step. Steps that come faster than they are exported
    are left out, and counted.

    Args:
        counts: where the stamps are; None: nothing is stamped.
    """

    def __init__(self, geometry: HandoffGeometry, counts: DeviceCounts | None) -> None:
        self._geometry = geometry
        self._counts = counts
        self._open: Begun | None = None
        self._ended: queue.Queue[_Ended | None] = queue.Queue(_QUEUED)
        self._thread: threading.Thread | None = None
        self.lost = 0

    def begin_step(self, begun: Begun) -> None:
        """A step of which the forward comes now."""
        self._open = begun

    def end_step(self) -> None:
        """The forward of the step that was begun is enqueued; never waits."""
        begun, self._open = self._open, None
        if begun is None or begun.trace is None:
            return
        attachment = begun.attachment
        if self._counts is None or attachment is None:
            begun.trace.end()  # nothing of it was stamped
            return
        if attachment.detached_because:
            begun.trace.event("detached", {"dsa.reason": attachment.detached_because})
        # If the service dies with its part of it, that is exported from the bank.
        attachment.remote_traces.add(begun.number, begun.trace)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dsa-traces", daemon=True)
            self._thread.start()
        done = new_event()
        done.record()
        try:
            ended = _Ended(begun.trace, begun.number, attachment.epoch, done)
            self._ended.put_nowait(ended)
        except queue.Full:
            self.lost += 1
            begun.trace.end()

    def close(self) -> None:
        """Export what is left."""
        self.end_step()
        if self._thread is not None:
            self._ended.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        leave_captures_alone()
        assert self._counts is not None
        clock, looked = ClockOffset(0, 0), -_CLOCK_SECONDS
        while (ended := self._ended.get()) is not None:
            try:
                ended.done.synchronize()
                if time.monotonic() - looked >= _CLOCK_SECONDS:
                    clock, looked = self._counts.clock(), time.monotonic()
                self._export(ended, clock)
            except Exception:
                # Without this thread nothing is traced any more, and nobody would know why.
                logger.exception("step %d: not exported", ended.step)

    def _export(self, ended: _Ended, clock: ClockOffset) -> None:
        assert self._counts is not None
        times = self._counts.stamps(ended.step)
        if times is not None:
            times = on_the_hosts_clock(times, clock)
            ended.trace.event("clock", {"dsa.clock_error_ns": clock.error})
        end_step(ended.trace, self._geometry, ended.step, ended.epoch, times, None)
