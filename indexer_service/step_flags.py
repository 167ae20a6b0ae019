"""How a service's stream waits for its worker: its gates poll, or it sleeps until flags wake it.

Under `timeslice` nothing may poll: a gate that waited would burn this process's turn on the GPU
while the worker waits for its own. There the stream sleeps in a stream memory operation in front
of each gate, which looks once. Nothing on the GPU ends a sleep, so that the thread that looks
whether steps are finished does: after the gates' bound, when the worker has left the step, and
when the session ends.

Steps are launched kernel by kernel: a captured operation holds the value that it waits for.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from indexer_service.attachment import Attachment
from indexer_service.device_stream import Mark
from ipc_handoff.flag_words import FlagWords
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.tell import tell, tell_given_up
from ipc_handoff.kernels.words import Gate
from ipc_handoff.regions import HostMemory
from ipc_handoff.stream_words import MappedFlags, wait_at_least


class Polling:
    """Gates poll by themselves, and the worker's waits do.

    Attributes:
        can_capture: what is captured of a step answers other steps, too.
    """

    can_capture = True

    def gate_bound(self, nanoseconds: int) -> int:
        """How long a gate may poll that is given so long."""
        return nanoseconds

    def begin(self, step: int, ordinals: Sequence[int]) -> None:
        """A step of these layers is launched from now on."""

    def sleep(self, gate: Gate, ordinal: int = 0) -> None:
        """In front of a gate, on the current stream."""

    def advanced(self, memory: ServiceMemory) -> None:
        """Behind a window of work."""

    def answered(self, memory: ServiceMemory, ordinal: int) -> None:
        """Behind a layer's answer."""

    def given_up(self, memory: ServiceMemory, step: int) -> None:
        """Behind the word that says so of a step that was not launched."""

    def watched(self, mark: Mark) -> Mark:
        """The mark, at which somebody looks until it is reached."""
        return mark

    def wake(self) -> None:
        """Whatever was launched sleeps no more. From any thread."""

    def close(self) -> None:
        """Nothing that was launched runs any more."""


POLLING = Polling()


class Sleeping(Polling):
    """
    Args:
        memory: the worker's flags.
        layers: of the session. device: with its index.
        bound: seconds without a sign of either side after which a step's sleep ends.
        is_over: whether the worker has detached, or the service wants steps to end.
    """

    can_capture = False

    def __init__(
        self,
        memory: HostMemory,
        layers: int,
        device: torch.device,
        bound: float,
        is_over: Callable[[], bool],
    ) -> None:
        self._mapped = MappedFlags(memory, layers, device.index)
        self._words = FlagWords(memory.view(), layers)
        self._device = device
        self._bound = bound
        self._is_over = is_over
        self._step = 0
        self._begun: deque[tuple[int, Sequence[int]]] = deque()
        self._seen: tuple[int, ...] = ()
        self._since = 0.0

    def gate_bound(self, nanoseconds: int) -> int:
        return 0

    def begin(self, step: int, ordinals: Sequence[int]) -> None:
        self._step = step
        self._begun.append((step, ordinals))
        self._since = time.monotonic()

    def sleep(self, gate: Gate, ordinal: int = 0) -> None:
        layout = self._mapped.layout
        word = layout.published if gate == Gate.PUBLISHED else layout.request(ordinal)
        wait_at_least(self._stream(), self._mapped.address + word, self._step)

    def advanced(self, memory: ServiceMemory) -> None:
        tell(memory, self._mapped.address + self._mapped.layout.progress)

    def answered(self, memory: ServiceMemory, ordinal: int) -> None:
        layout, address = self._mapped.layout, self._mapped.address
        tell(memory, address + layout.progress, address + layout.answer(ordinal))

    def given_up(self, memory: ServiceMemory, step: int) -> None:
        tell_given_up(memory, step, self._mapped.address + self._mapped.layout.answer(0))

    def watched(self, mark: Mark) -> Mark:
        return _Watched(mark, self._look)

    def wake(self) -> None:
        for step, ordinals in list(self._begun):
            self._words.wake(step, ordinals)

    def close(self) -> None:
        self._begun.clear()
        self._mapped.close()

    def _look(self) -> None:
        words = self._words
        while self._begun and self._has_come(*self._begun[0]):
            self._begun.popleft()
        if not self._begun:
            return
        if self._is_over():
            self.wake()
            return
        step, ordinals = self._begun[0]
        requests = (words.request(ordinal) for ordinal in ordinals)
        seen = (words.published(), words.progress(), *requests)
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        if words.published() > step or now - self._since >= self._bound:
            words.wake(step, ordinals)

    def _has_come(self, step: int, ordinals: Sequence[int]) -> bool:
        """Whether a step sleeps no more."""
        words = self._words
        return words.published() >= step and all(words.request(at) >= step for at in ordinals)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream


def flags_of(
    attachment: Attachment, device: torch.device, bound: float, is_closing: Callable[[], bool]
) -> Polling:
    """How an attachment's stream waits.

    Args:
        bound: seconds that its gates wait.
        is_closing: the service wants steps to end.

    Raises:
        RegionError: the driver cannot map the flags.
    """
    if attachment.flags is None:
        return POLLING
    is_detached = attachment.control.bells.is_detached
    layers = len(attachment.geometry.layers)
    return Sleeping(attachment.flags, layers, device, bound, lambda: is_detached() or is_closing())


class _Watched:
    """A mark whose reader looks after the sleeping stream."""

    def __init__(self, mark: Mark, look: Callable[[], None]) -> None:
        self._mark = mark
        self._look = look

    def query(self) -> bool:
        if self._mark.query():
            return True
        self._look()
        return False
