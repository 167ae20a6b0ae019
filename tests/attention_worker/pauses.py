"""Where a service works slowly when a test says so: to be ended, or late, in the middle of a step.

A kernel stands behind every gate and behind the scores of every layer. In one layer it spins for
as long as a word says that test and service share.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from indexer_service import step_kernels
from ipc_handoff.device import look, nanoseconds
from ipc_handoff.device_layout import DEVICE_LINE
from ipc_handoff.flag_words import FlagLayout
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.words import Gate
from ipc_handoff.regions import HostMemory
from ipc_handoff.stream_words import MappedFlags
from ipc_handoff.words import Words

ORDINAL = tl.constexpr(1)
"""Of the layer."""
_ONE = 1
"""Words are mapped as flags of so many layers are."""


class Place(IntEnum):
    """Of a pause in a layer; the place of its word."""

    BEHIND_GATE = 0
    BEHIND_SCORES = 1


class Pauses:
    """The test's side.

    Attributes:
        memory: give its descriptor to the service.
    """

    def __init__(self) -> None:
        self.memory = HostMemory.create(FlagLayout(_ONE).size, "pauses")
        self._words = Words(self.memory.view(), DEVICE_LINE)

    @contextmanager
    def at(self, place: Place, seconds: float) -> Iterator[None]:
        """The service pauses there in steps that run inside."""
        self._words.store(int(seconds * 1e9), place)
        try:
            yield
        finally:
            self._words.store(0, place)


@triton.jit(do_not_specialize=("ordinal", "word"))
def _pause_kernel(ordinal, word: tl.int64):
    if ordinal == ORDINAL:
        # Once: the word is gone with the service's process, and this may run on.
        until = nanoseconds(True) + look(word, True)
        while nanoseconds(True) < until:
            pass


@contextmanager
def pausing(descriptor: int, device: torch.device) -> Iterator[None]:
    """A service that is started inside pauses where the words behind a descriptor say so."""
    words = MappedFlags(HostMemory.open(descriptor, writable=True), _ONE, device.index)
    real_gate, real_layer = step_kernels.gate, step_kernels.enqueue_step
    current = [0]

    def pause(place: Place) -> None:
        _pause_kernel[(1,)](current[0], words.address + place * DEVICE_LINE, num_warps=1)

    def gate(memory: ServiceMemory, kind: Gate, *, ordinal: int = 0, **options: Any) -> None:
        real_gate(memory, kind, ordinal=ordinal, **options)
        current[0] = ordinal
        if kind != Gate.PUBLISHED:
            pause(Place.BEHIND_GATE)

    def enqueue_step(*arguments: Any, on_stage: Callable[[str], None], **options: Any) -> None:
        def staged(stage: str) -> None:
            on_stage(stage)
            if stage == "logits":
                pause(Place.BEHIND_SCORES)

        real_layer(*arguments, on_stage=staged, **options)

    with ExitStack() as patches:
        patches.enter_context(patch.object(step_kernels, "gate", gate))
        patches.enter_context(patch.object(step_kernels, "enqueue_step", enqueue_step))
        yield
