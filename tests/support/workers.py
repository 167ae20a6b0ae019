"""A worker in a process of its own: runs steps, and ends with status 3 at a wrong answer."""

import os
import sys
import traceback
from ctypes import c_int64
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch

from indexer_client import ClientSettings, Session
from tests.support.processes import Process
from tests.support.workloads import Checker, RandomSteps, Shape

WRONG_ANSWER, FAILED = 3, 4
# Words that worker and test share, without a lock: the worker may die at any moment.
_STEPS, _ANSWERED, _STOP, _WORDS = range(4)


def _work(seed: int, settings: dict[str, Any], words: Any) -> None:
    torch.set_num_threads(1)
    try:
        status = _run(seed, ClientSettings(**settings), words)
    except BaseException:
        traceback.print_exc()
        status = FAILED
    sys.stdout.flush()
    os._exit(status)


def _run(seed: int, settings: ClientSettings, words: Any) -> int:
    steps, checker = RandomSteps(Shape.random(seed), seed), Checker()
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
        while not words[_STOP]:
            case = steps.case(words[_STEPS], all_layers=False)
            with session.step(case.inputs, case.layers) as step:
                checker.run(step, case)
            words[_STEPS] += 1
            words[_ANSWERED] = session.statistics.answered_layers
    if checker.wrong:
        print(checker.wrong[0])
    return WRONG_ANSWER if checker.wrong else 0


class WorkerProcess(Process):
    """Runs until `finish`, or until it is killed."""

    def __init__(self, seed: int, settings: ClientSettings) -> None:
        self._words = RawArray(c_int64, _WORDS)
        super().__init__(_work, seed, settings.model_dump(), self._words)

    @property
    def steps(self) -> int:
        return int(self._words[_STEPS])

    @property
    def answered(self) -> int:
        """Layers that a service answered."""
        return int(self._words[_ANSWERED])

    def finish(self) -> int | None:
        """End in good order; the exit status."""
        self._words[_STOP] = 1
        return self.wait()
