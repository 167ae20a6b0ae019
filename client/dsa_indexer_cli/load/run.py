"""Runs a load test: a process a session, one clock for all."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from dsa_indexer_cli.load.collector import Collector
from dsa_indexer_cli.load.host import Host, host_of
from dsa_indexer_cli.load.messages import (
    Done,
    Failed,
    GpuMemory,
    Order,
    Preparing,
    Ready,
    Records,
)
from dsa_indexer_cli.load.recorded import geometry_of
from dsa_indexer_cli.load.resources import GpuSample, Sample, sample
from dsa_indexer_cli.load.session_process import run_session
from dsa_indexer_cli.load.worker import Opened
from dsa_indexer_cli.load.workload import Workload
from ipc_handoff.layout import HandoffGeometry

_NANOSECONDS = 1_000_000_000
_LEAD_NANOSECONDS = 200_000_000
_TICK_SECONDS = 0.25
_READY_SECONDS, _GPU_READY_SECONDS = 180.0, 1200.0
"""A GPU of a kind that was never tuned for takes minutes."""
_END_SECONDS = 60.0
_EXIT_SECONDS = 20.0
_SERVICE = "service"


@dataclass(frozen=True)
class Progress:
    """How far it is. Times in milliseconds, of the steps since the last one."""

    doing: str
    seconds: float = 0.0
    of_seconds: float = 0.0
    steps: int = 0
    steps_a_second: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    failures: int = 0


Tell = Callable[[Progress], None]


@dataclass
class Finished:
    """What came out of all processes.

    Attributes:
        opened: as the last session that got ready was.
        samples: by process or GPU.
    """

    collector: Collector
    dones: list[Done]
    failures: list[str]
    opened: Opened
    samples: dict[str, list[Sample | GpuSample]]
    host: Host
    geometry: HandoffGeometry


def run_sessions(
    workload: Workload, address: str | None, tell: Tell, stop: threading.Event
) -> Finished:
    """Run the sessions of a workload.

    Args:
        address: of a running service; None: start one, and end it at the end.
        tell: told a few times a second how far it is.
        stop: when set, the sessions end after their running step.

    Raises:
        IndexerError: no service answers at the address.
        RuntimeError: the service did not start, or cannot be used here.
        WorkloadError: the recording cannot be read, or there is no such GPU.
    """
    geometry_of(workload)  # rather now than after a service has started
    with host_of(workload.load, address, lambda doing: tell(Progress(doing))) as host:
        return run_on(host, workload, tell, stop)


def run_on(host: Host, workload: Workload, tell: Tell, stop: threading.Event) -> Finished:
    """As `run_sessions`, on a host that is there."""
    return _Run(host, workload, tell).run(stop)


class _Run:
    def __init__(self, host: Host, workload: Workload, tell: Tell) -> None:
        self._host, self._workload, self._tell = host, workload, tell
        self._geometry = geometry_of(workload)
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(
            ["dsa_indexer_cli.main", run_session.__module__, Host.__module__]
        )
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, ForkServerProcess] = {}
        self._sample_seconds = workload.soak.sample_seconds if workload.soak else 1.0
        self._dones: list[Done] = []
        self._failures: list[str] = []
        self._opened = Opened("")
        self._samples: dict[str, list[Sample | GpuSample]] = {}

    def _start(self, number: int) -> None:
        self._pipes[number], theirs = self._context.Pipe()
        host = self._host
        order = Order(
            number,
            host.address,
            self._workload,
            host.make_worker,
            host.status.gpu_uuid,
            host.environment,
        )
        process = self._context.Process(target=run_session, args=(order, theirs), daemon=True)
        self._processes[number] = process
        process.start()
        theirs.close()

    def run(self, stop: threading.Event) -> Finished:
        try:
            self._get_ready(stop)
            collector = self._collect(stop)
        finally:
            for number, process in self._processes.items():
                # One that has said its last word ends by itself: killing a process that has a GPU
                # may take other clients of its MPS daemon along.
                if number not in self._pipes:
                    process.join(_EXIT_SECONDS)
                process.kill()
                process.join()
        return Finished(
            collector,
            self._dones,
            self._failures,
            self._opened,
            self._samples,
            self._host,
            self._geometry,
        )

    def _get_ready(self, stop: threading.Event) -> None:
        """All at once, or one after the other: each would spoil what another one tunes."""
        sessions = range(self._workload.load.sessions)
        for numbers in [{number} for number in sessions] if self._host.gpu else [set(sessions)]:
            for number in numbers:
                self._start(number)
            self._wait_ready(numbers, stop)
            if stop.is_set():
                break

    def _wait_ready(self, waiting: set[int], stop: threading.Event) -> None:
        seconds = _GPU_READY_SECONDS if self._host.gpu else _READY_SECONDS
        deadline = time.monotonic() + seconds
        doing = ""
        while waiting and not stop.is_set():
            left = f"{len(waiting)} sessions get ready" if len(waiting) > 1 else ""
            of_one = f"session {min(waiting)} gets ready" + (f": {doing}" if doing else "")
            self._tell(Progress(left or of_one))
            for number, message in self._messages(waiting):
                if isinstance(message, Preparing):
                    doing = message.doing
                    continue
                waiting.discard(number)
                if isinstance(message, Ready):
                    self._opened = message.opened
            if waiting and time.monotonic() > deadline:
                raise RuntimeError(f"{len(waiting)} sessions were not ready in {seconds:.0f} s")

    def _collect(self, stop: threading.Event) -> Collector:
        load = self._workload.load
        start = time.monotonic_ns() + _LEAD_NANOSECONDS
        begin = start + int(load.warm_up_seconds * _NANOSECONDS)
        collector = Collector(begin, load.seconds)
        for pipe in self._pipes.values():
            with suppress(OSError):  # its process has failed, which is noticed below
                pipe.send(start)
        working = set(self._pipes)
        looks = _Every(self._sample_seconds)
        tells = _Every(1.0)
        told_stop, last = False, (begin, 0)
        deadline = begin / _NANOSECONDS + load.seconds + _END_SECONDS
        while working:
            for _, message in self._messages(working):
                if isinstance(message, Records):
                    collector.add(message.rows(len(self._geometry.layers)))
                elif isinstance(message, GpuMemory):
                    self._note(message, begin)
                elif isinstance(message, Done):
                    self._dones.append(message)
            now = time.monotonic_ns()
            elapsed = (now - begin) / _NANOSECONDS
            if 0 <= elapsed <= load.seconds and looks.is_due():
                self._look(elapsed)
            if tells.is_due():
                last = self._report(collector, elapsed, last)
            if stop.is_set() and not told_stop:
                told_stop = True
                deadline = now / _NANOSECONDS + _END_SECONDS
                for number in working:
                    with suppress(OSError):
                        self._pipes[number].send("stop")
            if time.monotonic() > deadline:
                self._failures += [f"session {number} does not end" for number in sorted(working)]
                break
        return collector

    def _messages(self, working: set[int]) -> list[tuple[int, object]]:
        """What has come. Sessions that have ended or failed leave `working`."""
        numbers = {self._pipes[number]: number for number in working if number in self._pipes}
        found: list[tuple[int, object]] = []
        for pipe in wait(list(numbers), min(_TICK_SECONDS, self._sample_seconds)):
            assert isinstance(pipe, Connection)
            number = numbers[pipe]
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                self._processes[number].join(1.0)
                status = self._processes[number].exitcode
                message = Failed(number, f"its process ended with status {status}")
            if isinstance(message, Failed):
                self._failures.append(f"session {number}: {message.reason}")
            if isinstance(message, Failed | Done):
                working.discard(number)
                del self._pipes[number]
            found.append((number, message))
        return found

    def _note(self, message: GpuMemory, begin: int) -> None:
        seconds = (message.nanoseconds - begin) / _NANOSECONDS
        if 0 <= seconds <= self._workload.load.seconds:
            for name, used in message.used_mib.items():
                self._samples.setdefault(name, []).append(GpuSample(seconds, used))

    def _look(self, seconds: float) -> None:
        watched = {}
        if self._host.address:
            watched[_SERVICE] = self._host.status.pid
        if self._workload.soak is not None:
            for number, process in self._processes.items():
                if process.pid is not None and number in self._pipes:
                    watched[f"session {number}"] = process.pid
        for name, pid in watched.items():
            if (found := sample(pid, seconds)) is not None:
                self._samples.setdefault(name, []).append(found)

    def _report(
        self, collector: Collector, elapsed: float, last: tuple[int, int]
    ) -> tuple[int, int]:
        now, steps = time.monotonic_ns(), collector.steps
        latest = collector.take_latest()
        self._tell(
            Progress(
                "warming up" if elapsed < 0 else "running",
                max(elapsed, 0.0),
                self._workload.load.seconds,
                steps,
                (steps - last[1]) / max((now - last[0]) / _NANOSECONDS, 1e-9),
                latest.percentile(50.0),
                latest.percentile(99.0),
                len(self._failures),
            )
        )
        return now, steps


class _Every:
    """Whether so many seconds have gone by since it last said yes."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._next = seconds, 0.0

    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
