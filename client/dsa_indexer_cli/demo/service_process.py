"""A service in a process of its own, which the demo may kill."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from indexer_client import ClientSettings, IndexerError
from indexer_client.control_plane import ControlPlane

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0


@contextmanager
def own_environment(kept: Sequence[str] = ()) -> Iterator[None]:
    """Neither `DSA_INDEXER_*` nor `OTEL_*` inside: what a user has set is not for the demo.

    Args:
        kept: variables that count all the same.
    """
    foreign = [
        name
        for name in os.environ
        if name.startswith(("DSA_INDEXER_", "OTEL_")) and name not in kept
    ]
    saved = {name: os.environ.pop(name) for name in foreign}
    try:
        yield
    finally:
        os.environ.update(saved)


def serve_command(address: str, trace_file: Path | None, device: str = "") -> list[str]:
    """`dsa-indexer serve`, by this Python."""
    command = [sys.executable, "-m", "dsa_indexer_cli", "serve", "--address", address]
    if device:
        command += ["--device", device]
    return command if trace_file is None else [*command, "--trace-file", str(trace_file)]


class ServiceProcess:
    """`dsa-indexer serve` at `address`; logs go to `log`, spans to `trace_file` if one is given.

    Args:
        command: what is run instead, if it is given.
        device: as for `serve`; empty: its default.
    """

    def __init__(
        self,
        address: str,
        trace_file: Path | None,
        log: Path,
        command: Sequence[str] | None = None,
        device: str = "",
    ) -> None:
        self._address = address
        self._command = list(command or serve_command(address, trace_file, device))
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, seconds: float = _START_SECONDS) -> None:
        """Start it and wait until it serves, for so long at most.

        Raises:
            RuntimeError: it ended, or did not serve in time.
        """
        with self._log.open("ab") as log:
            # Ctrl-C is for the program that started it, which ends it when it needs it no more.
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + seconds
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service does not serve; its log is {self._log}")
            time.sleep(0.02)

    def _serves(self) -> bool:
        control_plane = ControlPlane(ClientSettings(address=self._address))
        try:
            return control_plane.get_status().serving
        except IndexerError:
            return False
        finally:
            control_plane.close()

    def mapped_bytes(self) -> int:
        """What the service says that it has mapped."""
        control_plane = ControlPlane(ClientSettings(address=self._address))
        try:
            return control_plane.get_status().mapped_bytes
        finally:
            control_plane.close()

    def kill(self) -> None:
        """SIGKILL; returns once it is dead."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        if self._process is None:
            return 0
        self._process.terminate()
        try:
            return self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL
