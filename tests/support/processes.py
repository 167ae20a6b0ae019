"""Services and workers in processes of their own, which tests may kill and freeze.

They are forked from a server that has imported everything, since a test kills dozens of them
and an import of torch takes seconds. The command `dsa-indexer serve` is run by tests/cli.
"""

import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import ClientSettings, IndexerError
from indexer_client.control_plane import ControlPlane
from indexer_service import serving
from indexer_service.settings import Settings
from ipc_handoff.addresses import UNIX
from tests.support.waiting import SOON

_fork = get_context("forkserver")
_fork.set_forkserver_preload(
    ["torch", "indexer_service.serving", "indexer_client", "indexer_service.engines.cpu"]
)
START_SECONDS = 60.0
STOP_SECONDS = 30.0


def descriptors(pid: int | None = None) -> list[str]:
    """What a process (default: this one) has open, without inode numbers.

    Pipes are left out: tests hold one for each process that they forked.
    """
    found = []
    folder = f"/proc/{pid or os.getpid()}/fd"
    for name in os.listdir(folder):
        with suppress(OSError):
            found.append(os.readlink(f"{folder}/{name}").split(":[")[0])
    return sorted(kind for kind in found if kind != "pipe")


def mapped_memories(pid: int | None = None) -> list[str]:
    """Mappings of shared memory of this project in a process (default: this one)."""
    with open(f"/proc/{pid or os.getpid()}/maps") as maps:
        return [line for line in maps if "dsa-indexer:" in line]


class Process:
    """A forked process.

    Attributes:
        pid: valid until it has been waited for.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._process = _fork.Process(target=target, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns once it is dead."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = STOP_SECONDS) -> int | None:
        """The exit status; negative: the signal; None: still alive."""
        self._process.join(seconds)
        return self._process.exitcode

    def stop(self) -> int | None:
        """SIGTERM; the exit status, or None if it did not end in time and was killed."""
        self.signal(signal.SIGTERM)
        status = self.wait()
        if status is None:
            self.kill()
        return status

    def descriptors(self) -> list[str]:
        return descriptors(self.pid)

    def mapped_memories(self) -> list[str]:
        """Mappings of shared memory of this project."""
        return mapped_memories(self.pid)


def _nothing() -> None:
    pass


def _serve(settings: dict[str, Any], collects_garbage: bool, prepare: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    prepare()
    if not collects_garbage:
        gc.disable()
    logging.basicConfig(level=logging.ERROR)
    serving.run(Settings(**settings))


class ServiceProcess(Process):
    """A service at `socket`; serves once the constructor returns.

    Args:
        collects_garbage: False: what reference counts do not free is never freed.
        prepare: called in the process first; a module's function.

    Attributes:
        own_address: of this very process, also when another one has taken over `address`.
    """

    def __init__(
        self,
        socket: Path,
        *,
        collects_garbage: bool = True,
        prepare: Callable[[], None] = _nothing,
        **settings: Any,
    ) -> None:
        self.address = f"{UNIX}{socket}"
        super().__init__(_serve, {"address": self.address, **settings}, collects_garbage, prepare)
        self.own_address = f"{self.address}.{self.pid}"
        deadline = time.monotonic() + START_SECONDS
        while not self.serves():
            if not self.is_alive or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError("the service does not serve")
            time.sleep(0.01)

    def status(self) -> pb.GetStatusResponse:
        """Raises IndexerError."""
        control_plane = ControlPlane(
            ClientSettings(address=self.own_address, rpc_timeout_seconds=SOON)
        )
        try:
            return control_plane.get_status()
        finally:
            control_plane.close()

    def serves(self) -> bool:
        try:
            return self.status().serving
        except IndexerError:
            return False


def nothing_mapped(service: ServiceProcess) -> bool:
    """Whether the service has no session and no memory of one."""
    status = service.status()
    return not status.sessions and status.mapped_bytes == 0 and not service.mapped_memories()


def left_in(directory: Path) -> list[str]:
    """Files in a directory that may be gone; its maker takes it away, a successor does not."""
    return os.listdir(directory) if directory.exists() else []
