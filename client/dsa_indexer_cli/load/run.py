"""Runs a load test: a service if none is given, a process a session, one clock for all."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer_cli.demo.service_process import ServiceProcess, own_environment
from dsa_indexer_cli.load.collector import Collector
from dsa_indexer_cli.load.messages import Done, Failed, Order, Ready, Records
from dsa_indexer_cli.load.recorded import geometry_of
from dsa_indexer_cli.load.resources import Sample, sample
from dsa_indexer_cli.load.session_process import run_session
from dsa_indexer_cli.load.workload import Workload
from indexer_client import ClientSettings
from indexer_client.control_plane import ControlPlane
from ipc_handoff.addresses import UNIX
from ipc_handoff.layout import HandoffGeometry

_NANOSECONDS = 1_000_000_000
_LEAD_NANOSECONDS = 200_000_000
_TICK_SECONDS = 0.25
_READY_SECONDS = 180.0
_END_SECONDS = 60.0
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
    """What came out of all processes."""

    collector: Collector
    dones: list[Done]
    failures: list[str]
    reasons: tuple[str, ...]
    samples: dict[str, list[Sample]]
    status: pb.GetStatusResponse
    address: str
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
        WorkloadError: the recording cannot be read.
    """
    geometry = geometry_of(workload)
    with _service(address, tell) as found:
        status = _status(found)
        if status.gpu_uuid:
            raise RuntimeError(
                f"{found}: this service is on a GPU, and load tests share host memory (fix: one "
                "with --device cpu; on a GPU: benchmarks/handoff_gpu.py)"
            )
        return _Run(workload, found, status, geometry, tell).run(stop)


def _status(address: str) -> pb.GetStatusResponse:
    control_plane = ControlPlane(ClientSettings(address=address))
    try:
        return control_plane.get_status()
    finally:
        control_plane.close()


@contextmanager
def _service(address: str | None, tell: Tell) -> Iterator[str]:
    """The address of the service to load."""
    if address is not None:
        yield address
        return
    tell(Progress("starting a service"))
    with tempfile.TemporaryDirectory(prefix="dsa-indexer-load-") as folder, own_environment():
        own = f"{UNIX}{Path(folder) / 'sockets' / 'indexer.sock'}"
        log = Path(folder) / "service.log"
        service = ServiceProcess(own, None, log)
        try:
            service.start()
            yield own
            status = service.stop()
            if status != 0:
                raise RuntimeError(f"the service ended with status {status}: {_tail(log)}")
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{_tail(log)}") from None
        finally:
            service.kill()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-5:]) if log.exists() else ""


class _Run:
    def __init__(
        self,
        workload: Workload,
        address: str,
        status: pb.GetStatusResponse,
        geometry: HandoffGeometry,
        tell: Tell,
    ) -> None:
        self._workload, self._address, self._status = workload, address, status
        self._geometry, self._tell = geometry, tell
        context = get_context("forkserver")
        context.set_forkserver_preload(["dsa_indexer_cli.main", run_session.__module__])
        self._pipes: dict[int, Connection] = {}
        self._processes = {}
        for number in range(workload.load.sessions):
            self._pipes[number], theirs = context.Pipe()
            order = Order(number, address, workload)
            process = context.Process(target=run_session, args=(order, theirs), daemon=True)
            self._processes[number] = process
            process.start()
            theirs.close()
        self._sample_seconds = workload.soak.sample_seconds if workload.soak else 1.0
        self._dones: list[Done] = []
        self._failures: list[str] = []
        self._reasons: tuple[str, ...] = ()
        self._samples: dict[str, list[Sample]] = {}

    def run(self, stop: threading.Event) -> Finished:
        try:
            self._wait_ready(stop)
            collector = self._collect(stop)
        finally:
            for process in self._processes.values():
                process.kill()
                process.join()
        return Finished(
            collector,
            self._dones,
            self._failures,
            self._reasons,
            self._samples,
            self._status,
            self._address,
            self._geometry,
        )

    def _wait_ready(self, stop: threading.Event) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        waiting = set(self._pipes)
        while waiting and not stop.is_set():
            self._tell(Progress(f"{len(waiting)} sessions get ready"))
            for number, message in self._messages(waiting):
                waiting.discard(number)
                if isinstance(message, Ready):
                    self._reasons = message.reasons
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(waiting)} sessions were not ready in {_READY_SECONDS} s")

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

    def _look(self, seconds: float) -> None:
        watched = {_SERVICE: self._status.pid}
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
