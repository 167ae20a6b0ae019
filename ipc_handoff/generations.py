"""Whose data a slot holds: a word beside each slot of staging and answers, in host memory.

| word | writer | meaning |
|---|---|---|
| `staged_inputs[slot]` | worker | step whose lengths and tables are here |
| `staged_layers[slot]` | worker | step and layer whose q and weights are here |
| `answered_layers[slot]` | service | step and layer whose answer is here |

A word is written twice: "being written" before the first byte of the data, "written" behind the
last. Who finds "written" by his own step and layer, before he reads and again afterwards, has read
that and nothing else. Doorbells say when data may be read: these words only tell when that was not
kept to.

Where data lies in device memory, so do the words (`device_layout.SlotLine`), and kernels write
and read them (`device.generation`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from ipc_handoff.layout import CACHE_LINE, ControlLayout
from ipc_handoff.words import WORD_MAX, Words, fence

LAYER_BITS = 12


class Generation(NamedTuple):
    """Compared by step, then layer, then whether it is written: what came earlier is less.

    Attributes:
        layer: an ordinal; 0 of lengths and tables.
    """

    step: int
    layer: int = 0
    is_written: bool = True

    @classmethod
    def of(cls, word: int) -> "Generation":
        place = word >> 1
        return cls(place >> LAYER_BITS, place % (1 << LAYER_BITS), bool(word & 1))

    @property
    def word(self) -> int:
        return ((self.step << LAYER_BITS | self.layer) << 1 | self.is_written) & WORD_MAX


def named(generation: Generation, layers: Sequence[int]) -> str:
    """For people. layers: ids by ordinal."""
    if generation.step == 0:
        return "nothing yet"
    known = generation.layer < len(layers)
    layer = str(layers[generation.layer]) if known else "unknown"
    ending = "" if generation.is_written else ", being written"
    return f"step {generation.step}, layer {layer}{ending}"


class _Slots:
    """The words of one kind of slot."""

    def __init__(self, control: memoryview, layout: ControlLayout, name: str) -> None:
        self._words = Words(layout.areas[name].of(control), CACHE_LINE)
        self._slots = len(self._words)

    def begin(self, step: int, layer: int = 0) -> None:
        """Before the first store into the slot of `step`."""
        self._words.store(Generation(step, layer, False).word, step % self._slots)
        fence()  # Who sees anything of the data sees this.

    def end(self, step: int, layer: int = 0) -> None:
        """Behind the last one, and before the doorbell."""
        self._words.store(Generation(step, layer).word, step % self._slots)

    def of(self, step: int) -> Generation:
        """What the slot of `step` holds now; again behind a copy: whether it still did."""
        fence()
        return Generation.of(self._words.load(step % self._slots))


class Generations:
    """Of one attachment; each side writes its own.

    Attributes:
        inputs: of lengths and tables; layers: of q and weights. The worker writes them.
        answers: the service writes them.
    """

    def __init__(self, control: memoryview, layout: ControlLayout) -> None:
        self.inputs = _Slots(control, layout, "staged_inputs")
        self.layers = _Slots(control, layout, "staged_layers")
        self.answers = _Slots(control, layout, "answered_layers")
