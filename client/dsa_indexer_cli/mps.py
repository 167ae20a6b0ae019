"""MPS daemons: where one is looked for, and one of a program's own where there is none."""

import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dsa_indexer_cli.ending import when_asked_to_end

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_PIPES = "/tmp/nvidia-mps"
_PIPE = "control"
_SECONDS, _LISTENS_SECONDS = 30, 30.0


def mps_pipe() -> Path:
    """Where this process and its children look for a daemon."""
    return Path(os.environ.get(_PIPES, _DEFAULT_PIPES)) / _PIPE


def is_served() -> bool:
    """Whether something listens there; False also where it may not be looked at."""
    return os.path.exists(mps_pipe())


@contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """Start a daemon and end it; the variables that its clients need.

    Args:
        folder: for its pipes and logs; made here. A path of a few characters: it holds sockets.

    Raises:
        RuntimeError: it is not installed, or does not start.
    """
    folder.mkdir()
    variables = {_PIPES: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    environment = {**os.environ, **variables}
    _start(folder / "started.log", environment)
    try:
        _wait_until_it_listens(folder)
        yield variables
    finally:
        _end(environment)


def run_under_mps(command: Sequence[str]) -> int:
    """A command in a process under a daemon of its own; its exit status.

    In a process, since a daemon must not end before those that have a context under it. Who is
    asked to end waits for it, too: Ctrl-C the terminal tells both, all else is passed on.

    Raises:
        RuntimeError: no daemon can be started.
    """
    with (
        tempfile.TemporaryDirectory(prefix="dsa-indexer-mps-") as folder,
        mps_daemon(Path(folder) / "mps") as variables,
    ):
        started: list[subprocess.Popen[bytes]] = []

        def pass_on(number: int, _: object) -> None:
            for process in started:
                if number != signal.SIGINT:
                    process.terminate()

        with when_asked_to_end(pass_on):
            started.append(subprocess.Popen(command, env={**os.environ, **variables}))
            return started[0].wait()


def _start(log: Path, environment: dict[str, str]) -> None:
    """What it says goes to a file: of a pipe nobody would see the end while the daemon lives."""
    try:
        with log.open("w") as file:
            subprocess.run(
                [CONTROL, "-d"],
                env=environment,
                check=True,
                timeout=_SECONDS,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise _not_started(log.read_text().strip() or str(error)) from None


def _end(environment: Mapping[str, str]) -> None:
    """A daemon waits for its clients. That must not hide why it was to end."""
    try:
        subprocess.run(
            [CONTROL],
            input=b"quit\n",
            env=environment,
            check=False,
            timeout=_SECONDS,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        folder = environment[_PIPES]
        logger.warning("mps: the daemon of %s has not ended: it still has clients", folder)


def _wait_until_it_listens(folder: Path) -> None:
    """Clients that come too early would find no daemon."""
    deadline = time.monotonic() + _LISTENS_SECONDS
    while not (folder / _PIPE).exists():
        if time.monotonic() > deadline:
            raise _not_started(f"{CONTROL} -d does not listen")
        time.sleep(0.01)


def _not_started(why: str) -> RuntimeError:
    return RuntimeError(
        f"mps: no daemon could be started: {why} (fix: {CONTROL} of the NVIDIA driver's package "
        "in PATH, on a host with a GPU; or do without MPS)"
    )
