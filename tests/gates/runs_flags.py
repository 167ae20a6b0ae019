"""What is interpreted of the worker's flags and of the GPU's clock, which stands still here."""

import torch

from ipc_handoff.flag_words import Answer, FlagLayout, FlagWords
from ipc_handoff.kernels.clock import clock_offset
from ipc_handoff.kernels.flag import raise_flag
from ipc_handoff.kernels.words import WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.layout import HandoffGeometry
from tests.gates import watch
from tests.gates.kernels import Run

GEOMETRY = HandoffGeometry(
    layers=(3, 7), heads=16, head_dim=8, top_k=8, page_size=32, max_rows=4, max_requests=2,
    max_context=64, slots=2,
)  # fmt: skip
POISON = 77


def _raise(step: int, ordinal: int) -> tuple[FlagWords, torch.Tensor]:
    """The block after one layer's flag, from words that are full of nonsense."""
    layers = len(GEOMETRY.layers)
    layout = FlagLayout(layers)
    block = torch.full((layout.size // 8,), POISON, dtype=torch.int64)
    memory = WorkerMemory(GEOMETRY, torch.device("cpu"))
    memory.state[WorkerState.CURRENT] = step
    watch.also_allowed[:] = [block]
    begin = block.data_ptr()
    raise_flag(memory, begin + layout.request(ordinal), begin + layout.answer(ordinal))
    return FlagWords(memoryview(block.numpy()).cast("B"), layers), block


def _a_step_asks() -> None:
    words, block = _raise(9, 1)
    assert words.request(1) == 9
    assert words.is_waited_for(1)
    assert int((block != POISON).sum()) == 2, "another word was written"


def _no_step_passes() -> None:
    layout = FlagLayout(len(GEOMETRY.layers))
    words, block = _raise(0, 1)
    assert int(block[layout.answer(1) // 8]) == Answer.ANSWERED
    assert words.request(1) == POISON, "nobody is asked"
    assert int((block != POISON).sum()) == 1, "another word was written"


def _clock() -> None:
    found = clock_offset(torch.device("cpu"))
    assert found.offset > 0 and found.error >= 0


RUNS = [
    Run("flag of a step", _a_step_asks),
    Run("flag without a step", _no_step_passes),
    Run("clock", _clock),
]
