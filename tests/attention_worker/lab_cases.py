"""The race lab's races on a GPU as far as its worker finds them, interpreted.

`python -m tests.attention_worker.lab_cases` runs them and prints one JSON line a case.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch

from tests.attention_worker.device_step_bench import worker  # first: it sets the interpreter up

# isort: split
from attention_worker import device_handoff
from attention_worker.device_findings import DeviceFindings
from dsa_indexer_cli.racelab import cuda_bench, cuda_races
from dsa_indexer_cli.racelab.batches import Sort
from dsa_indexer_cli.racelab.cuda_bench import GEOMETRY, CudaBench
from dsa_indexer_cli.racelab.cuda_races import PROVOCATIONS
from dsa_indexer_cli.racelab.cuda_run import _clean
from dsa_indexer_cli.racelab.cuda_service import ReadFindings
from dsa_indexer_cli.racelab.provocation import Provocation, provoke
from dsa_indexer_cli.racelab.service import Collected
from ipc_handoff.banks import ANSWERS, STAGING
from ipc_handoff.regions import TensorSpec
from tests.attention_worker.hand_service import HandAttachment, HandBank, HandWorker
from tests.support.cases import tell

assert worker

CPU = torch.device("cpu")
OF_THE_WORKER = (
    "pinned buffer under speculative decoding: bounds only",
    "pinned buffer: slot mapping",
    "answer rung before it is written",
    "answer overwritten while it is handed back",
    "shared indices of another step",
)


class _Memory:
    """A region of a bank, as `CudaMemory`."""

    def __init__(self, of: torch.Tensor, address: int) -> None:
        self._of, self._begin = of, address - of.data_ptr()

    def tensor(self, offset: int, byte_size: int, spec: TensorSpec, name: str) -> torch.Tensor:
        begin = self._begin + offset
        return self._of[begin : begin + byte_size].view(spec.dtype).view(spec.shape)


def _rewritten(values: torch.Tensor, later: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Without a GPU no copy is pending: what it would bring."""
    return later(values.clone())


class Lab:
    """The lab's bench with a worker whose service is this process."""

    def __init__(self, stack: ExitStack) -> None:
        caches = {
            layer: torch.zeros(cuda_bench.PAGES, 64, 132, dtype=torch.uint8)
            for layer in GEOMETRY.layers
        }
        self.made = made = HandWorker(GEOMETRY, caches)
        bank = HandBank(GEOMETRY, 1)
        bank.memories = cast(
            Any,
            {
                STAGING: _Memory(bank.staging, bank.staging_address),
                ANSWERS: _Memory(bank.answers, bank.answers_address),
            },
        )
        self.attachment: HandAttachment = made.attach(bank)
        found = Collected("worker")
        made.steps._listeners._listeners += (found,)
        self.bench = CudaBench(cast(Any, made.steps), CPU, found, ReadFindings(Path("/nowhere")))
        real = device_handoff.wait

        def served(memory: Any, *, ordinal: int, **options: Any) -> None:
            made._serve(ordinal)
            real(memory, ordinal=ordinal, **options)

        stack.enter_context(patch.object(device_handoff, "wait", served))
        stack.enter_context(patch.object(cuda_races, "rewritten", _rewritten))
        stream = SimpleNamespace(synchronize=lambda: None)
        stack.enter_context(patch.object(torch.cuda, "current_stream", lambda: stream))
        stack.enter_context(patch.object(cuda_bench, "_REPORT_SECONDS", 0.01))


def _race(name: str) -> Provocation[CudaBench, Any]:
    (race,) = (race for race in PROVOCATIONS if race.name == name)
    return race


def caught(name: str) -> None:
    with ExitStack() as stack:
        lab = Lab(stack)
        lab.bench.run(lab.bench.batch(Sort()))
        if name.startswith("answer rung"):
            # The service comes when the worker has taken what was rung for the answer.
            lab.made.turn = lambda ordinal, step: None
        (one,) = provoke(lab.bench, [_race(name)], 2, lambda doing: None)
        assert (one.provoked, one.caught) == (2, 2), one
        assert one.stages and one.stages[0].startswith("worker: "), one
        assert one.kind in one.example


def clean_steps() -> None:
    with ExitStack() as stack:
        found = _clean(Lab(stack).bench, 14, lambda doing: None, 1e9)
    assert found.false_alarms == 0, found.examples
    assert len(found.steps) == 6 and sum(found.steps.values()) == 14
    assert found.inline_layers == 0


def clean_steps_end_in_time() -> None:
    with ExitStack() as stack:
        found = _clean(Lab(stack).bench, 1000, lambda doing: None, 0.0)
    assert sum(found.steps.values()) < 1000


CASES: dict[str, Callable[[], None]] = {
    **{name: partial(caught, name) for name in OF_THE_WORKER},
    "clean steps": clean_steps,
    "clean steps end in time": clean_steps_end_in_time,
}


def _planted() -> Iterator[tuple[str, Callable[[], None], Any, str, Any]]:
    """Name, case, and what is replaced by what."""
    for name in OF_THE_WORKER[:2]:
        yield f"nobody looks: {name}", CASES[name], DeviceFindings, "looks", lambda self, _: None


if __name__ == "__main__":
    tell(CASES, _planted())
