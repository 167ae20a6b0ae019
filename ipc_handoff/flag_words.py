"""Words in host memory that streams wait for where nothing may poll: contexts that take turns.

They wake a stream, and say no more: a kernel behind looks once at the words of the hand-over and
decides. One block serves a worker for its life, since a captured wait holds its word's address.
Both sides register it with CUDA (`stream_words`); a process without CUDA can write it as well.

| word | writer | value |
|---|---|---|
| `published`, `request(layer)` | worker | the step; streams wait for at least theirs |
| `answer(layer)` | worker: 0 before it requests; service: 1; a watchdog: 2 | see `Answer` |
| `progress` | service | one more for each window; for the watchdog |
"""

from enum import IntEnum

from ipc_handoff.device_layout import DEVICE_LINE
from ipc_handoff.words import Words


class Answer(IntEnum):
    """A wait passes at 1 or more."""

    NONE = 0
    ANSWERED = 1
    ABORTED = 2


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
        self._first_answer = layout.answer(0) // DEVICE_LINE
        self._first_request = layout.request(0) // DEVICE_LINE
        self.layers = layers

    def progress(self) -> int:
        return self._words.load()

    def request(self, ordinal: int) -> int:
        return self._words.load(self._first_request + ordinal)

    def is_waited_for(self, ordinal: int) -> bool:
        """Whether the layer was asked for, and neither answered nor aborted."""
        asked = self.request(ordinal) != 0
        return asked and self._words.load(self._first_answer + ordinal) == Answer.NONE

    def abort(self, ordinal: int) -> None:
        """Let the wait for a layer's answer end."""
        self._words.store(Answer.ABORTED, self._first_answer + ordinal)
