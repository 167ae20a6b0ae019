"""Service processes of a test, at one address: some wait for their turn, and one serves."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import ClientSettings, IndexerError
from indexer_client.control_plane import ControlPlane
from tests.attention_worker.pauses import Pauses

READY_SECONDS = 120.0


class Services:
    """
    Args:
        device: ordinal of their GPU.
        count: how many can serve, one after the other.
        settings: of the service, NAME=VALUE.
        environment: of the service; by default this process's.

    Attributes:
        serving: the one that was started last.
        pauses: of all of them.
    """

    def __init__(
        self,
        folder: Path,
        device: int,
        count: int,
        *settings: str,
        environment: dict[str, str] | None = None,
    ) -> None:
        path = f"{folder}/d/i.sock"
        self.address = f"unix:{path}"
        self.pauses = Pauses()
        descriptor = self.pauses.memory.fileno()
        command = [sys.executable, "-m", "tests.attention_worker.service_program"]
        self._all = []
        for number in range(count):
            with (folder / f"service-{number}.log").open("w") as log:
                self._all.append(
                    subprocess.Popen(
                        [*command, path, f"cuda:{device}", f"{descriptor}", *settings],
                        stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(descriptor,),
                        env=environment,
                    )
                )  # fmt: skip
        self._waiting = list(self._all)
        self.serving = self._all[0]

    def start(self) -> None:
        """Let the next one serve."""
        self.serving = self._waiting.pop(0)
        assert self.serving.stdin is not None
        self.serving.stdin.write(b"serve\n")
        self.serving.stdin.close()

    def wait_until_it_serves(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            status = self.status()
            if status is not None and status.serving and status.pid == self.serving.pid:
                return
            time.sleep(0.02)
        raise TimeoutError("the service does not serve")

    def status(self) -> pb.GetStatusResponse | None:
        """What the service at the address says; None if nobody does."""
        settings = ClientSettings(address=self.address, rpc_timeout_seconds=0.3)
        control_plane = ControlPlane(settings)
        try:
            return control_plane.get_status()
        except IndexerError:
            return None
        finally:
            control_plane.close()

    def send(self, number: signal.Signals) -> None:
        """To the one that serves, without waiting for its end."""
        self.serving.send_signal(number)

    def close(self) -> None:
        for process in self._all:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self._all:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def logs(folder: Path) -> str:
    """The end of what each of them, and each worker, has logged there."""
    told = []
    for path in sorted(folder.glob("*.log")):
        if text := path.read_text().strip():
            told.append(f"== {path.name}\n{text[-2500:]}")
    return "\n".join(told)
