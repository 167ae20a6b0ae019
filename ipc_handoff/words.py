"""64-bit words in memory that two processes share.

Every shared word has one writer. CPython stores and loads an aligned 64-bit word of a
`memoryview` in one machine instruction, so a word is never torn; what differs between
processors is the order in which stores become visible. x86-64 keeps the order of stores
and the order of loads by itself. Elsewhere (Arm) `fence` brings order.
"""

import platform
import threading

_KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64")
_fence_lock = threading.Lock()

WORD_BYTES = 8
WORD_MAX = 2**64 - 1


def fence() -> None:
    """Order everything before against everything after, on weakly ordered processors.

    Python has no fence of its own. Unlocking releases and locking acquires, and the second
    pair cannot move before the first: what stands before is visible before what stands after.
    """
    if _KEEPS_ORDER:
        return
    with _fence_lock:
        pass
    with _fence_lock:
        pass


class Words:
    """A row of shared words, `stride` bytes apart.

    Args:
        buffer: shared bytes; its start must be aligned to 8.
        stride: bytes between words; 64 keeps words of different writers on different cache
            lines.
    """

    def __init__(self, buffer: memoryview, stride: int = WORD_BYTES) -> None:
        if stride % WORD_BYTES or len(buffer) % WORD_BYTES:
            raise ValueError(f"stride {stride} and size {len(buffer)} must be multiples of 8")
        self._words = buffer.cast("B").cast("Q")
        self._step = stride // WORD_BYTES

    def __len__(self) -> int:
        return len(self._words) // self._step

    def load(self, index: int = 0) -> int:
        """Read a word; whatever its writer stored before it can be read afterwards."""
        value = self._words[index * self._step]
        fence()
        return value

    def store(self, value: int, index: int = 0) -> None:
        """Write a word after everything stored before has become visible."""
        fence()
        self._words[index * self._step] = value
