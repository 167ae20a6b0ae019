"""One session of a load test, in a process of its own: what another one does, it feels only
through the service."""

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
    NO_LAYER,
    NOT_BEGUN,
    Column,
    Done,
    Failed,
    Order,
    Ready,
    Records,
    width,
)
from dsa_indexer_cli.load.recorded import recorded_steps
from dsa_indexer_cli.load.steps import PlannedStep, SessionSteps, drawn_steps
from indexer_client import ClientSettings, IndexerError, Session, Source, StepInputs

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
    torch.set_num_threads(1)
    with suppress(BrokenPipeError):  # the parent is gone, and nobody is left to be told
        try:
            runner = _Runner(order, pipe)
            pipe.send(Ready(runner.open()))
            pipe.send(runner.run(pipe.recv()))
        except (IndexerError, ValueError, RuntimeError, OSError, EOFError) as error:
            pipe.send(Failed(order.number, f"{type(error).__name__}: {error}"))


class _Check:
    """An answer that waits to be compared."""

    def __init__(
        self,
        number: int,
        layer: int,
        inputs: StepInputs,
        query: tuple[torch.Tensor, torch.Tensor],
        answer: torch.Tensor,
    ) -> None:
        self.number, self.layer, self.inputs, self.query = number, layer, inputs, query
        self.answer = answer.clone()


class _Runner:
    def __init__(self, order: Order, pipe: Connection) -> None:
        self._workload, self._pipe = order.workload, pipe
        self._address = order.address
        seed = order.workload.steps.seed * 1009 + order.number
        make = drawn_steps if order.workload.replay is None else recorded_steps
        self._steps: SessionSteps = make(order.workload, seed)
        self._chance = random.Random(seed)
        self._seed = seed
        self._layers = self._steps.geometry.layers
        geometry = self._steps.geometry
        self._out = torch.empty(geometry.max_rows, geometry.top_k, dtype=torch.int32)
        self._expected = torch.empty_like(self._out)
        self._records: list[np.ndarray] = []
        self._sent = time.monotonic_ns()
        self._pending: deque[_Check] = deque()
        self._check_nanoseconds = 0
        self._done = Done(order.number)

    def open(self) -> tuple[str, ...]:
        """Attach; why the service is as it is.

        Raises:
            IndexerError: there is no service, or it refused.
        """
        load = self._workload.load
        self._session = Session(
            self._steps.geometry,
            self._steps.k_caches,
            self._steps.fallback,
            settings=ClientSettings(
                address=self._address,
                signalling=load.signalling,
                wait_bound_seconds=load.wait_bound_seconds,
            ),
            engine_name="load",
        )
        self._session.start()
        try:
            self._session.wait_attached(load.attach_seconds)
        except IndexerError:
            self._session.close()
            raise
        self._opened = time.monotonic_ns()
        return self._session.reasons

    def run(self, begin: int) -> Done:
        """Steps from `begin` on, in nanoseconds of the monotonic clock."""
        load = self._workload.load
        self._counted_from = begin + int(load.warm_up_seconds * _NANOSECONDS)
        end = self._counted_from + int(load.seconds * _NANOSECONDS)
        times = arrivals(load, begin, end, self._seed, self._steps.seconds)
        self._wait_until(begin)
        for number, intended in enumerate(times):
            self._wait_until(intended)
            if self._pipe.poll():  # whatever it says, it is the order to end
                break
            if time.monotonic_ns() > end + _LATE_SECONDS * _NANOSECONDS:
                self._give_up(number, intended)
                continue
            self._run_step(number, intended)
            self._between_steps()
        while self._pending:
            self._compare(self._pending.popleft())
        self._send()
        self._close()
        self._steps.close()
        return self._done

    def _run_step(self, number: int, intended: int) -> None:
        planned = self._steps.step(number)
        record = self._record(planned, intended)
        rows = planned.inputs.rows
        out = self._out[:rows]
        queries = {layer: self._steps.query(number, layer, rows) for layer in planned.layers}
        compared = self._compared(planned)
        # After the preparation, which an engine's forward has anyway. In a closed loop it is also
        # when the step was to begin.
        began = time.monotonic_ns()
        if self._workload.load.mode == "closed":
            record[Column.INTENDED] = began
        with self._session.step(planned.inputs, planned.layers) as step:
            for layer in planned.layers:
                asked = time.monotonic_ns()
                source = step.select(layer, *queries[layer], out=out)
                spent = time.monotonic_ns() - asked
                record[len(Column) + self._layers.index(layer)] = spent
                record[Column.INLINE] += source is Source.INLINE
                if layer == compared and source is Source.SERVICE:
                    self._pending.append(_Check(number, layer, planned.inputs, queries[layer], out))
        record[Column.BEGAN], record[Column.ENDED] = began, time.monotonic_ns()
        self._records.append(record)

    def _record(self, planned: PlannedStep, intended: int) -> np.ndarray:
        record = np.full(width(len(self._layers)), NO_LAYER, dtype=np.int64)
        record[Column.INTENDED] = intended
        record[Column.KIND] = planned.kind
        record[Column.REQUESTS] = planned.inputs.requests
        record[Column.ROWS] = planned.inputs.rows
        record[Column.LONGEST] = planned.longest
        record[Column.INLINE] = 0
        return record

    def _give_up(self, number: int, intended: int) -> None:
        record = self._record(self._steps.step(number), intended)
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

    def _compare(self, check: _Check) -> None:
        began = time.monotonic_ns()
        expected = self._expected[: check.inputs.rows]
        self._steps.fallback(check.layer, *check.query, check.inputs, expected)
        bad = (check.answer != expected).any(dim=1).nonzero().flatten().tolist()
        self._done.checked += 1
        if bad:
            self._done.wrong_answers += 1
            if len(self._done.wrong) < _TOLD_WRONG:
                self._done.wrong.append(
                    f"session {self._done.number}, step {check.number}, layer {check.layer}, "
                    f"rows {bad[:8]}: {check.answer[bad[0]].tolist()[:8]}... instead of "
                    f"{expected[bad[0]].tolist()[:8]}..."
                )
        self._check_nanoseconds = time.monotonic_ns() - began

    def _send(self) -> None:
        if self._records:
            self._pipe.send(Records(np.stack(self._records).tobytes()))
            self._records.clear()
        self._sent = time.monotonic_ns()

    def _close(self) -> None:
        statistics = self._session.statistics
        self._session.close()
        self._done.cancelled_steps += statistics.cancelled_steps
        self._done.rejected_steps += statistics.rejected_steps
        self._done.detachments += statistics.detachments
        self._done.faulted_rows += statistics.faulted_rows
