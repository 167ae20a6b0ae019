"""A `DeviceStream` without a GPU: work is done at once, and is finished when a test says so."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from indexer_service.device_stream import told_when_lost


class FakeMark:
    def __init__(self, stream: "FakeStream", done: bool) -> None:
        self._stream = stream
        self.done = done

    def query(self) -> bool:
        self._stream.check()
        return self.done


class FakeStream:
    """Attributes:
    holds: what is marked from now on is not done before `release`.
    marks: not done yet, oldest first. captured, launched: graphs made, and launches of them.
    memory: what was pinned. on_synchronize: called first.
    error: what every call of CUDA fails with.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.holds = False
        self.marks: list[FakeMark] = []
        self.captured, self.launched = 0, 0
        self.is_closed = False
        self.memory: list[Tensor] = []
        self.on_synchronize: Callable[[], None] = lambda: None
        self.error: Exception | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    @contextmanager
    def current(self) -> Iterator[None]:
        with told_when_lost(self.device):
            yield

    def pinned(self, words: int, dtype: torch.dtype) -> Tensor:
        self.memory.append(torch.zeros(words, dtype=dtype))
        return self.memory[-1]

    def mark(self) -> FakeMark:
        mark = FakeMark(self, not self.holds)
        if self.holds:
            self.marks.append(mark)
        return mark

    def release(self, count: int = 1) -> None:
        """The oldest are done."""
        for _ in range(count):
            self.marks.pop(0).done = True

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def graph() -> None:
            self.launched += 1
            launch()

        return graph

    def synchronize(self) -> None:
        self.check()
        self.on_synchronize()
        self.release(len(self.marks))

    def close(self) -> None:
        self.is_closed = True
