"""Words in host memory that streams wait for where nothing may poll: contexts that take turns.

They wake a stream, and say no more: a kernel behind looks once at the words of the hand-over and
decides. One block serves a worker for its life, since a captured wait holds its word's address.
Both sides register it with CUDA (`stream_words`); a process without CUDA can write it as well.

Nothing on the GPU ends a sleep: a watchdog of the worker's aborts waits for answers, and the
service's own thread wakes its stream, by storing the step that it has slept for.

| word | writer | value |
|---|---|---|
| `published`, `request(layer)` | worker; service, to wake itself | the step; waits: at least it |
| `answer(layer)` | worker: 0 before it requests; service: 1 or 3; a watchdog: 2 | see `Answer` |
| `progress` | service | one more for each window; for the watchdog |
"""

from collections.abc import Iterable
from enum import IntEnum

from ipc_handoff.device_layout import DEVICE_LINE
from ipc_handoff.words import Words

FLAGS = "flags"
"""Name of the block's region."""


class Answer(IntEnum):
    """A wait passes at 1 or more."""

    NONE = 0
    ANSWERED = 1
    ABORTED = 2
    CANCELLED = 3
    """The service gave the step up."""


class FlagLayout:
    """Bytes from the block's start.

    Args:
        layers: how many have an indexer.

    Attributes:
        progress, published: of these words. size: of the block.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.progress = 0
        self.published = DEVICE_LINE
        self.size = (2 + 2 * layers) * DEVICE_LINE

    def request(self, ordinal: int) -> int:
        """Of a layer's request."""
        return (2 + ordinal) * DEVICE_LINE

    def answer(self, ordinal: int) -> int:
        """Of a layer's answer."""
        return (2 + self._layers + ordinal) * DEVICE_LINE


class FlagWords:
    """The block as a process without CUDA sees it.

    Args:
        buffer: the block.
        layers: how many have an indexer.
    """

    def __init__(self, buffer: memoryview, layers: int) -> None:
        layout = FlagLayout(layers)
        self._words = Words(buffer[: layout.size], DEVICE_LINE)
        self._published = layout.published // DEVICE_LINE
        self._first_answer = layout.answer(0) // DEVICE_LINE
        self._first_request = layout.request(0) // DEVICE_LINE
        self.layers = layers

    def progress(self) -> int:
        return self._words.load()

    def published(self) -> int:
        return self._words.load(self._published)

    def request(self, ordinal: int) -> int:
        return self._words.load(self._first_request + ordinal)

    def wake(self, step: int, ordinals: Iterable[int]) -> None:
        """End every sleep for what a step waits for: of `published`, and of layers' requests.

        A word that a newer step has raised meanwhile stays as it is.
        """
        for word in (self._published, *(self._first_request + ordinal for ordinal in ordinals)):
            if self._words.load(word) < step:
                self._words.store(step, word)

    def is_waited_for(self, ordinal: int) -> bool:
        """Whether the layer was asked for, and neither answered nor aborted."""
        asked = self.request(ordinal) != 0
        return asked and self._words.load(self._first_answer + ordinal) == Answer.NONE

    def abort(self, ordinal: int) -> None:
        """Let the wait for a layer's answer end."""
        self._words.store(Answer.ABORTED, self._first_answer + ordinal)
