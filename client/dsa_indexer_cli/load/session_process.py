"""One session of a load test, in a process of its own: what another one does, it feels only
through the service."""

import os
import random
import signal
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np
import torch

from dsa_indexer_cli.load.arrivals import arrivals
from dsa_indexer_cli.load.messages import (
    NOT_BEGUN,
    Column,
    Done,
    Failed,
    GpuMemory,
    Order,
    Preparing,
    Ready,
    Records,
    width,
)
from dsa_indexer_cli.load.steps import PlannedStep
from dsa_indexer_cli.load.worker import NO_TIME, Check, Opened
from dsa_indexer_cli.load.workload import WorkloadError
from indexer_client import IndexerError

_SEND_NANOSECONDS = 400_000_000
_PENDING_CHECKS = 32
_TOLD_WRONG = 5
_LATE_SECONDS = 5.0
"""After the end, steps of an open loop that have arrived are still run for so long."""

_NANOSECONDS = 1_000_000_000


def run_session(order: Order, pipe: Connection) -> None:
    """What the process runs: get ready, wait for the time to start, run, say how it went."""
    # Ctrl-C goes to the whole group of processes; the parent says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(order.environment)
    # Sessions are many: threads that wait for each other take the cores away from the service.
    torch.set_num_threads(1)
    with suppress(BrokenPipeError):  # the parent is gone, and nobody is left to be told
        try:
            runner = _Runner(order, pipe)
            pipe.send(Ready(runner.open()))
            pipe.send(runner.run(pipe.recv()))
        except (IndexerError, WorkloadError, ValueError, RuntimeError, OSError, EOFError) as error:
            pipe.send(Failed(order.number, f"{type(error).__name__}: {error}"))


class _Runner:
    def __init__(self, order: Order, pipe: Connection) -> None:
        self._workload, self._pipe = order.workload, pipe
        self._worker = order.make_worker(order)
        self._chance = random.Random(order.seed)
        self._seed = order.seed
        self._layers = self._worker.steps.geometry.layers
        self._records: list[np.ndarray] = []
        self._sent = time.monotonic_ns()
        self._pending: deque[Check] = deque()
        self._check_nanoseconds = 0
        self._is_counting = False
        # One session is enough: it is the whole GPU that is looked at.
        soak = order.workload.soak if order.number == 0 else None
        self._look_nanoseconds = int(soak.sample_seconds * _NANOSECONDS) if soak else 0
        self._looked = 0
        self._number, self._done = order.number, Done()

    def open(self) -> Opened:
        """Attach; why all is as it is.

        Raises:
            IndexerError: there is no service, or it refused.
        """
        opened = self._worker.open(lambda doing: self._pipe.send(Preparing(doing)))
        self._opened = time.monotonic_ns()
        return opened

    def run(self, begin: int) -> Done:
        """Steps from `begin` on, in nanoseconds of the monotonic clock."""
        load = self._workload.load
        self._counted_from = begin + int(load.warm_up_seconds * _NANOSECONDS)
        end = self._counted_from + int(load.seconds * _NANOSECONDS)
        times = arrivals(load, begin, end, self._seed, self._worker.steps.seconds)
        self._wait_until(begin)
        for number, intended in enumerate(times):
            self._wait_until(intended)
            if self._pipe.poll():  # whatever it says, it is the order to end
                break
            if time.monotonic_ns() > end + _LATE_SECONDS * _NANOSECONDS:
                self._give_up(number, intended)
                continue
            if not self._is_counting and intended >= self._counted_from:
                self._send()  # what was inline in the warm-up belongs to its steps
                self._is_counting = True
            self._run_step(number, intended)
            self._look_at_gpu()
            self._between_steps()
        while self._pending:
            self._compare(self._pending.popleft())
        self._send()
        self._close()
        self._worker.free()
        return self._done

    def _run_step(self, number: int, intended: int) -> None:
        planned = self._worker.steps.step(number)
        record = self._record(planned, intended)
        ran = self._worker.run(number, planned, self._compared(planned))
        if self._workload.load.mode == "closed":
            record[Column.INTENDED] = ran.began
        record[Column.BEGAN], record[Column.ENDED] = ran.began, ran.ended
        record[Column.INLINE], record[Column.FORWARD] = ran.inline, ran.forward
        record[len(Column) :] = ran.layers
        self._records.append(record)
        if ran.check is not None:
            self._pending.append(ran.check)

    def _record(self, planned: PlannedStep, intended: int) -> np.ndarray:
        record = np.full(width(len(self._layers)), NO_TIME, dtype=np.int64)
        record[Column.INTENDED] = intended
        record[Column.KIND] = planned.kind
        record[Column.REQUESTS] = planned.inputs.requests
        record[Column.ROWS] = planned.inputs.rows
        record[Column.LONGEST] = planned.longest
        record[Column.LAYERS] = len(planned.layers)
        record[Column.INLINE] = 0
        return record

    def _give_up(self, number: int, intended: int) -> None:
        record = self._record(self._worker.steps.step(number), intended)
        record[Column.BEGAN], record[Column.ENDED] = NOT_BEGUN, time.monotonic_ns()
        self._records.append(record)

    def _compared(self, planned: PlannedStep) -> int | None:
        """The layer whose answer is to be compared, if any."""
        share = self._workload.check.share
        if self._chance.random() >= share or len(self._pending) >= _PENDING_CHECKS:
            return None
        return self._chance.choice(planned.layers)

    def _between_steps(self) -> None:
        load = self._workload.load
        if load.mode != "closed" and not load.reopen_seconds:
            return
        began = time.monotonic_ns()
        if load.mode == "closed":
            while self._pending:
                self._compare(self._pending.popleft())
        if load.reopen_seconds and began - self._opened > load.reopen_seconds * _NANOSECONDS:
            self._send()
            self._close()
            self.open()
            self._done.reopened += 1
        if began - self._sent > _SEND_NANOSECONDS:
            self._send()
        if began >= self._counted_from:
            self._done.paused_seconds += (time.monotonic_ns() - began) / _NANOSECONDS

    def _wait_until(self, at: int) -> None:
        """Compare answers and tell the parent, as far as there is time for it."""
        while (left := at - time.monotonic_ns()) > 0:
            if self._records and at - left - self._sent > _SEND_NANOSECONDS:
                self._send()
            elif self._pending and left > 2 * self._check_nanoseconds:
                self._compare(self._pending.popleft())
            else:
                time.sleep(left / _NANOSECONDS)

    def _compare(self, check: Check) -> None:
        began = time.monotonic_ns()
        wrong = self._worker.compare(check)
        self._done.checked += 1
        if wrong:
            self._done.wrong_answers += 1
            if len(self._done.wrong) < _TOLD_WRONG:
                self._done.wrong.append(
                    f"session {self._number}, step {check.number}, layer {check.layer}, {wrong}"
                )
        self._check_nanoseconds = time.monotonic_ns() - began

    def _send(self) -> None:
        if self._records:
            self._records[-1][Column.INLINE] += self._worker.inline_since()
            self._pipe.send(Records(np.stack(self._records).tobytes()))
            self._records.clear()
        self._sent = time.monotonic_ns()

    def _look_at_gpu(self) -> None:
        now = time.monotonic_ns()
        if self._look_nanoseconds and now - self._looked >= self._look_nanoseconds:
            if used := self._worker.gpu_memory():
                self._pipe.send(GpuMemory(now, used))
            self._looked = now

    def _close(self) -> None:
        statistics = self._worker.close()
        self._done.cancelled_steps += statistics.cancelled_steps
        self._done.rejected_steps += statistics.rejected_steps
        self._done.detachments += statistics.detachments
        self._done.faulted_rows += statistics.faulted_rows
