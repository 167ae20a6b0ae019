"""What the service launches for one step: gates, checked inputs, a selection a layer, bells.

Nothing here waits, and nothing reads the device: it may be captured. All memory is made once, so
that graphs can hold its addresses. Without a GPU it runs in Triton's interpreter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from indexer_service.kernels.architecture import beside_a_wait, sized_for
from indexer_service.kernels.device_inputs import (
    FAULT_WORDS,
    DeviceInputs,
    copy_checked,
    numbers_size,
)
from indexer_service.kernels.dispatch import TRITON
from indexer_service.kernels.epilogue import Epilogue
from indexer_service.kernels.nan_seen import NanSeen
from indexer_service.kernels.step import enqueue_step
from indexer_service.step_flags import POLLING, Polling
from ipc_handoff.banks import StagingSlot
from ipc_handoff.device_layout import DEVICE_LINE, DEVICE_STAMPED_STEPS, AnswersWord
from ipc_handoff.kernels.done import advance, done, tell_layer, telling
from ipc_handoff.kernels.gate import gate
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.words import Gate, Live
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.words import WORD_BYTES

STEP_WORDS = 2
"""int32 words of the step's number, in front of the step's other numbers."""

RESULT_HEAD = 8
"""int32 words in front of the faults in a result, behind the NaN words: `Live`, and a gap."""

_NAN_WORDS = 4
"""Of these there is a multiple, so that what follows is aligned."""

_LAUNCHES_A_LAYER, _LAUNCHES_A_STAGE = 4, 5
"""At the most, where scores and selection are Triton's; a stage includes gathering its keys."""


def nan_words(layers: int) -> int:
    """int32 words in front of a result: one a layer, see `NanSeen`, and a gap."""
    return -(-layers // _NAN_WORDS) * _NAN_WORDS


@dataclass(frozen=True)
class LaunchShape:
    """What the host decides of a step's launches.

    Attributes:
        slot: of the bank.
        decode_requests, rows_per_decode: the first requests, of equal rows.
        offsets: first row of each request, and the number of rows.
        length_bounds: of each request's length.
        columns: of the block table, that the lengths can reach.
        ordinals: of the step's layers, in order.
    """

    slot: int
    decode_requests: int
    rows_per_decode: int
    offsets: Sequence[int]
    length_bounds: Sequence[int]
    columns: int
    ordinals: Sequence[int]

    @property
    def requests(self) -> int:
        return len(self.length_bounds)

    @property
    def rows(self) -> int:
        return self.offsets[-1]


def tensor_at(
    address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Memory that somebody else keeps, for kernels on `device` (which may reach it over a link)."""
    numel = 1
    for size in shape:
        numel *= size
    storage = torch._C._construct_storage_from_data_pointer(address, device, numel * dtype.itemsize)
    strides, stride = [], numel
    for size in shape:
        stride //= size
        strides.append(stride)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, tuple(shape), tuple(strides))


class StepKernels:
    """Of one attachment.

    Args:
        device: where the service's stream runs; a CPU only in the interpreter.
        staging, answers: addresses of the bank's regions in this process.
        gate_bound: nanoseconds after which a gate gives the step up.
        workspace: bytes for temporaries of one window.
        flags: how the stream waits for the worker.
        checks_generations: whether kernels look whose data the slots hold.
        counts_nan: whether they note scores that are NaN.

    Attributes:
        plan: int32, the step's number, its numbers (`device_inputs`), and zeros in the place of the
            result's NaN words: written before every step, in one copy.
        numbers: where in it they are.
        result: int32, the NaN words (`nan_words`), `Live`, and, RESULT_HEAD words on, the faults:
            read behind every step.
        closing: int64 [1] in pinned host memory; not 0: steps end.
    """

    def __init__(
        self,
        geometry: HandoffGeometry,
        device: torch.device,
        staging: int,
        answers: int,
        gate_bound: int,
        workspace: int,
        flags: Polling = POLLING,
        *,
        checks_generations: bool = True,
        counts_nan: bool = True,
    ) -> None:
        self.geometry = geometry
        self.device = device
        self._gate_bound = flags.gate_bound(gate_bound)
        self._flags = flags
        self._workspace = workspace
        requests = geometry.max_requests
        layers = len(geometry.layers)
        self.numbers = slice(STEP_WORDS, STEP_WORDS + numbers_size(requests))
        begin = -(-self.numbers.stop // _NAN_WORDS) * _NAN_WORDS
        head = nan_words(layers)
        words = torch.zeros(
            begin + head + RESULT_HEAD + FAULT_WORDS * requests, dtype=torch.int32, device=device
        )
        self.plan, self.result = words[: begin + head], words[begin:]
        self._numbers = self.plan[self.numbers]
        seen = [self.result[layer : layer + 1] for layer in range(layers)]
        self._nan = [NanSeen(word) for word in seen] if counts_nan else [None] * layers
        self._memory = ServiceMemory(
            geometry, device, staging, answers, checks_generations=checks_generations
        )
        # Where they travel with the rest, in one copy each way.
        self._memory.step = self.plan[:STEP_WORDS].view(torch.int64)
        self._memory.live = self.result[head : head + len(Live)]
        self._memory.enabled = self._memory.live[Live.LIVE : Live.LIVE + 1]
        self._inputs = DeviceInputs(
            requests,
            geometry.table_width,
            device,
            faults=self.result[head + RESULT_HEAD :].view(requests, FAULT_WORDS),
        )
        self._row_ends = torch.zeros(geometry.max_rows, dtype=torch.int32, device=device)
        self._staging = [self._staging_slot(staging, slot) for slot in range(geometry.slots)]
        shape = (geometry.max_rows, geometry.top_k)
        self._answers = [
            tensor_at(answers + geometry.device.answers_at(slot), shape, torch.int32, device)
            for slot in range(geometry.slots)
        ]
        words_at = answers + AnswersWord.CANCELLED * DEVICE_LINE
        self._cancelled = tensor_at(words_at, (1,), torch.int64, device)
        layout = geometry.device
        shape = (DEVICE_STAMPED_STEPS, layout.stamp_stride // WORD_BYTES)
        self._stamps = tensor_at(answers + layout.stamps, shape, torch.int64, device)
        self.closing = self._memory.closing

    def launch(
        self,
        shape: LaunchShape,
        caches: Sequence[Tensor],
        spend: Callable[[int], None] = lambda launches: None,
    ) -> None:
        """Everything between the copy of the plan and that of the result, on the current stream.

        Args:
            caches: K cache of each of the shape's layers.
            spend: told about how many kernels were launched since it was last called.
        """
        with sized_for(beside_a_wait(self.device)):
            self._launch(shape, caches, spend)

    def _launch(
        self, shape: LaunchShape, caches: Sequence[Tensor], spend: Callable[[int], None]
    ) -> None:
        memory, slot = self._memory, self._staging[shape.slot]
        has_prefill = shape.decode_requests < shape.requests
        requests = slice(shape.requests)
        rows = slice(shape.rows)
        row_ends = self._row_ends[rows] if has_prefill else None
        self._flags.sleep(Gate.PUBLISHED)
        gate(memory, Gate.PUBLISHED, slot=shape.slot, bound=self._gate_bound)
        copy_checked(
            self._inputs, self._numbers, slot.query_start, slot.seq_lens, slot.block_table,
            bucket=shape.requests, pages=min(len(cache) for cache in caches),
            page_size=self.geometry.page_size, row_ends=row_ends,
        )  # fmt: skip
        kind = Gate.FIRST_LAYER
        for ordinal, cache in zip(shape.ordinals, caches, strict=True):
            self._flags.sleep(kind, ordinal)
            gate(memory, kind, slot=shape.slot, ordinal=ordinal, bound=self._gate_bound)
            kind = Gate.LAYER
            enqueue_step(
                slot.q[rows], slot.weights[rows], cache, self._inputs.seq_lens[requests],
                self._inputs.block_table[requests, : shape.columns], self.geometry.top_k,
                decode_requests=shape.decode_requests, rows_per_decode=shape.rows_per_decode,
                offsets=shape.offsets, length_bounds=shape.length_bounds, row_ends=row_ends,
                out=self._answers[shape.slot][rows], enabled=memory.enabled,
                epilogue=self._tells(ordinal, shape.slot),
                workspace=self._workspace, on_stage=self._progress(spend), impl=TRITON,
                nan=self._nan[ordinal],
            )  # fmt: skip
            self._flags.answered(memory, ordinal)
            spend(_LAUNCHES_A_LAYER)

    def give_up(self, step: int) -> None:
        """Tell the worker that a step that was not launched is not answered."""
        self._cancelled.fill_(step)
        self._flags.given_up(self._memory, step)

    def make_give_up(self) -> None:
        """Have what `give_up` launches made: of no step, nobody is told."""
        self._flags.given_up(self._memory, 0)

    def stamps_of(self, step: int) -> Tensor:
        """int64: a generation, the step if it still has the place, and a time a layer and stage."""
        return self._stamps[step % DEVICE_STAMPED_STEPS]

    def _tells(self, ordinal: int, slot: int) -> Epilogue:
        """Rings for a layer when its answer is written."""
        memory = self._memory
        alone = partial(done, memory, ordinal, slot)
        return Epilogue(tell_layer, telling(memory, ordinal, slot), alone)

    def _progress(self, spend: Callable[[int], None]) -> Callable[[str], None]:
        """Tells of every window but a layer's last one, of which its bell tells."""
        finished = 0

        def on_stage(stage: str) -> None:
            nonlocal finished
            spend(_LAUNCHES_A_STAGE)
            if stage == "topk":
                finished += 1
            elif finished:
                advance(self._memory)
                self._flags.advanced(self._memory)

        return on_stage

    def _staging_slot(self, staging: int, slot: int) -> StagingSlot:
        g, layout = self.geometry, self.geometry.device
        at = staging + layout.staging_at(slot)

        def area(offset: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return tensor_at(at + offset, shape, dtype, self.device)

        return StagingSlot(
            q=area(layout.q, g.max_rows, g.heads, g.head_dim, dtype=torch.float8_e4m3fn),
            weights=area(layout.weights, g.max_rows, g.heads, dtype=torch.float32),
            query_start=area(layout.query_start, g.max_requests + 1),
            seq_lens=area(layout.seq_lens, g.max_requests),
            block_table=area(layout.block_table, g.max_requests, g.table_width),
        )
