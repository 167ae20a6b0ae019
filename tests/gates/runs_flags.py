"""What is interpreted of both sides' flags, and of the GPU's clock, which stands still here."""

import torch

from ipc_handoff.device_layout import DEVICE_LINE, AnswersWord, StagingWord
from ipc_handoff.flag_words import Answer, FlagLayout, FlagWords
from ipc_handoff.kernels.clock import clock_offset
from ipc_handoff.kernels.flag import raise_flag
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.tell import tell, tell_given_up
from ipc_handoff.kernels.words import Live, WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.layout import HandoffGeometry
from tests.gates import watch
from tests.gates.kernels import Run

GEOMETRY = HandoffGeometry(
    layers=(3, 7), heads=16, head_dim=8, top_k=8, page_size=32, max_rows=4, max_requests=2,
    max_context=64, slots=2,
)  # fmt: skip
POISON = 77


def _block() -> torch.Tensor:
    """Flags that are full of nonsense."""
    return torch.full((FlagLayout(len(GEOMETRY.layers)).size // 8,), POISON, dtype=torch.int64)


def _region(words: dict[int, int]) -> torch.Tensor:
    """The first words of staging or answers, a line each, with these values."""
    region = torch.zeros(8 * DEVICE_LINE // 8, dtype=torch.int64)
    for number, value in words.items():
        region[number * DEVICE_LINE // 8] = value
    return region


def _raise(step: int, ordinal: int, given_up: int = 0) -> tuple[FlagWords, torch.Tensor]:
    """The block after one layer's flag."""
    layers = len(GEOMETRY.layers)
    layout = FlagLayout(layers)
    block, answers = _block(), _region({AnswersWord.CANCELLED: given_up})
    memory = WorkerMemory(GEOMETRY, torch.device("cpu"))
    memory.state[WorkerState.CURRENT] = step
    memory.state[WorkerState.ANSWERS] = answers.data_ptr()
    watch.also_allowed[:] = [block, answers]
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


def _a_step_that_was_given_up_waits_for_nobody() -> None:
    layout = FlagLayout(len(GEOMETRY.layers))
    for given_up, answer in ((8, Answer.NONE), (9, Answer.CANCELLED), (11, Answer.CANCELLED)):
        words, block = _raise(9, 1, given_up)
        assert int(block[layout.answer(1) // 8]) == answer, given_up
        assert words.request(1) == 9


def _tell(
    *, live: int, step: int = 9, published: int = 9, detached: int = 0, window: bool = False
) -> dict[str, int]:
    """What the service has written into the flags of layer 1, by word."""
    layout = FlagLayout(len(GEOMETRY.layers))
    block = _block()
    staging = _region({StagingWord.PUBLISHED: published, StagingWord.DETACHED: detached})
    memory = ServiceMemory(GEOMETRY, torch.device("cpu"), staging.data_ptr(), 0)
    memory.step.fill_(step)
    memory.progress.fill_(5)
    memory.live[Live.LIVE] = live
    watch.also_allowed[:] = [block, staging]
    begin = block.data_ptr()
    answer = {} if window else {"answer_flag": begin + layout.answer(1)}
    tell(memory, begin + layout.progress, **answer)
    named = {"progress": layout.progress, "answer": layout.answer(1)}
    told = {name: int(block[at // 8]) for name, at in named.items() if block[at // 8] != POISON}
    assert int((block != POISON).sum()) == len(told), "another word was written"
    return told


def _a_service_tells() -> None:
    assert _tell(live=1) == {"progress": 5, "answer": Answer.ANSWERED}
    assert _tell(live=1, window=True) == {"progress": 5}
    assert _tell(live=0) == {"answer": Answer.CANCELLED}
    assert _tell(live=0, window=True) == {}


def _a_service_leaves_flags_alone() -> None:
    for live in (0, 1):
        assert _tell(live=live, detached=1) == {}, "the flags may be its successor's"
        assert _tell(live=live, published=10) == {}, "the worker waits for another step"
        assert _tell(live=live, step=0, published=0) == {}, "warming up"


def _given_up(*, published: int = 9, detached: int = 0) -> list[int]:
    """Layers whose waits a service ends that gives step 9 up, by ordinal."""
    layout, block = FlagLayout(len(GEOMETRY.layers)), _block()
    staging = _region({StagingWord.PUBLISHED: published, StagingWord.DETACHED: detached})
    memory = ServiceMemory(GEOMETRY, torch.device("cpu"), staging.data_ptr(), 0)
    watch.also_allowed[:] = [block, staging]
    tell_given_up(memory, 9, block.data_ptr() + layout.answer(0))
    ended = [i for i in range(2) if block[layout.answer(i) // 8] == Answer.CANCELLED]
    assert int((block != POISON).sum()) == len(ended), "another word was written"
    return ended


def _a_step_that_was_not_launched_ends_every_wait_in_it() -> None:
    assert _given_up() == [0, 1]
    assert _given_up(detached=1) == [], "the flags may be its successor's"
    assert _given_up(published=10) == [], "the worker waits for another step"
    assert _given_up(published=8) == [], "it will find that nobody answers"


def _clock() -> None:
    found = clock_offset(torch.device("cpu"))
    assert found.offset > 0 and found.error >= 0


RUNS = [
    Run("flag of a step", _a_step_asks),
    Run("flag without a step", _no_step_passes),
    Run("flag of a step that was given up", _a_step_that_was_given_up_waits_for_nobody),
    Run("tell", _a_service_tells),
    Run("tell nobody", _a_service_leaves_flags_alone),
    Run("give up", _a_step_that_was_not_launched_ends_every_wait_in_it),
    Run("clock", _clock),
]
