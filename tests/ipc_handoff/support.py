"""What the tests of the data contract share: small geometries, raw memory, peer processes."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ipc_handoff.layout import HandoffGeometry
from tests.support.waiting import SOON

ROOT = Path(__file__).resolve().parents[2]

GEOMETRY = HandoffGeometry(
    layers=(0, 2, 5),
    heads=16,
    head_dim=128,
    top_k=64,
    page_size=64,
    max_rows=8,
    max_requests=4,
    max_context=1000,
    slots=3,
)


class RawMemory:
    """A memfd and its mapping, made without the code under test."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        self.bytes = memoryview(mmap.mmap(self.fd, size))

    def close(self) -> None:
        os.close(self.fd)


class Peer:
    """A process that runs a function of `children.py` (started afresh, nothing inherited).

    Args:
        name: of the function.
        arguments: its arguments, as text.
        descriptors: open in the child under the same numbers.
        program: another file of functions than `children.py`.
        environment: more variables.
    """

    def __init__(
        self,
        name: str,
        *arguments: object,
        descriptors: tuple[int, ...] = (),
        program: str = "children",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        path = f"{ROOT}:{ROOT}/proto:{ROOT}/client:{os.environ.get('PYTHONPATH', '')}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.ipc_handoff.{program}", name, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=descriptors,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> str:
        """The child's next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ask(self, line: object) -> str:
        self.tell(line)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        """Close its input, wait for it; the exit status."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return self.process.wait(2 * SOON)


@contextmanager
def peer(name: str, *arguments: object, **options: Any) -> Iterator[Peer]:
    """A `Peer`, killed at the end."""
    process = Peer(name, *arguments, **options)
    try:
        yield process
    finally:
        process.kill()


def is_mapped(label: str) -> bool:
    """Whether a mapping whose name contains `label` is in this process."""
    return label in Path("/proc/self/maps").read_text()


def content(sequence: int, size: int) -> bytes:
    """Bytes that only this message has."""
    word = (sequence * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little")
    return (sequence.to_bytes(8, "little") + word * (size // 8 + 1))[:size]


def size_of(sequence: int, most: int) -> int:
    """Message sizes that look random and that both sides can compute."""
    return 8 + sequence * 2654435761 % (most - 7)
