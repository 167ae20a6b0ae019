"""A service's kernels in a thread beside the worker.

Its thread has a stream of its own in the same process: its kernels run beside the worker's as
another process's do under MPS. It can be told to fall silent.
"""

import queue
import threading
from typing import Any, cast

import torch
from torch import Tensor

from attention_worker.captures import leave_captures_alone
from attention_worker.worker_banks import WorkerBank
from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.kernels.device_inputs import (
    DeviceInputs,
    copy_checked,
    numbers_size,
    pack_numbers,
)
from indexer_service.kernels.step import enqueue_step
from ipc_handoff.banks import ANSWERS, STAGING
from ipc_handoff.flag_words import Answer, FlagLayout
from ipc_handoff.kernels.done import done
from ipc_handoff.kernels.gate import gate
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.words import Gate
from ipc_handoff.regions import TensorSpec
from ipc_handoff.stream_words import wait_at_least, write_word
from tests.attention_worker.gpu_steps import GpuSteps
from tests.attention_worker.hand_service import HandAttachment

GATE_BOUND = 1_000_000_000


class GpuAttachment(HandAttachment):
    """Its plans go to whoever serves it."""

    def __init__(self, bank: WorkerBank, epoch: int) -> None:
        super().__init__(cast(Any, bank), epoch)
        self.plan_queue: queue.Queue[pb.StepPlan | None] = queue.Queue()

    def post(self, plan: pb.StepPlan) -> None:
        super().post(plan)
        self.plan_queue.put(plan)


class StandIn:
    """A service of one attachment.

    Attributes:
        is_silent: plans are thrown away.
        error: what ended its thread.
    """

    def __init__(self, steps: GpuSteps, attachment: GpuAttachment) -> None:
        self._geometry, self._steps = steps.geometry, steps
        self._attachment = attachment
        self._bank = cast(WorkerBank, attachment.bank)
        self._memory = ServiceMemory(
            steps.geometry, steps.device, self._bank.staging_address, self._bank.answers_address
        )
        self._inputs = DeviceInputs(
            steps.geometry.max_requests, steps.geometry.table_width, steps.device
        )
        size = numbers_size(steps.geometry.max_requests)
        self._numbers = torch.zeros(size, dtype=torch.int32, device=steps.device)
        self._row_ends = torch.zeros(
            steps.geometry.max_rows, dtype=torch.int32, device=steps.device
        )
        self._stream = torch.cuda.Stream(steps.device)
        self.is_silent = False
        self._warm_up()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _warm_up(self) -> None:
        """Load every kernel, which waits for all kernels that run: none must wait for us then."""
        for decodes, rows in ((1, [1]), (0, [2, 3]), (1, [2, 9])):
            offsets = torch.tensor([0, *rows]).cumsum(0).tolist()
            plan = pb.StepPlan(
                step=2**40, rows=offsets[-1], requests=len(rows), decode_requests=decodes,
                rows_per_decode=rows[0], max_length=64, layers=self._geometry.layers,
            )  # fmt: skip
            plan.exact.query_start.extend(offsets)
            self._enqueue(plan, bound=0)
        torch.cuda.synchronize()

    def close(self) -> None:
        self._memory.closing[0] = 1
        self._attachment.plan_queue.put(None)
        self._thread.join()
        self._stream.synchronize()
        assert self.error is None, self.error

    def _run(self) -> None:
        leave_captures_alone()
        try:
            with torch.cuda.stream(self._stream):
                while (plan := self._attachment.plan_queue.get()) is not None:
                    if not self.is_silent:
                        self._enqueue(plan)
        except BaseException as error:
            self.error = error

    def _staged(self, name: str, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        layout = self._geometry.device
        at = layout.staging_at(step % self._geometry.slots) + getattr(layout, name)
        spec = TensorSpec(shape, dtype)
        memory = self._bank.memories[STAGING]
        return memory.tensor(at, spec.byte_size, spec, name)

    def _enqueue(self, plan: pb.StepPlan, bound: int = GATE_BOUND) -> None:
        geometry, memory, step = self._geometry, self._memory, plan.step
        memory.step.fill_(step)
        buffer = torch.empty(len(self._numbers), dtype=torch.int32, pin_memory=True)
        offsets = list(plan.exact.query_start)
        pack_numbers(
            buffer, rows=plan.rows, requests=plan.requests, decode_requests=plan.decode_requests,
            rows_per_decode=plan.rows_per_decode, max_length=plan.max_length,
            exact_lengths=list(plan.exact.seq_lens) or None, exact_offsets=offsets,
        )  # fmt: skip
        self._numbers.copy_(buffer, non_blocking=True)
        requests, rows = geometry.max_requests, geometry.max_rows
        self._gate(Gate.PUBLISHED, 0, step, bound)
        copy_checked(
            self._inputs, self._numbers,
            self._staged("query_start", step, (requests + 1,), torch.int32),
            self._staged("seq_lens", step, (requests,), torch.int32),
            self._staged("block_table", step, (requests, geometry.table_width), torch.int32),
            bucket=requests, pages=self._steps.pages, page_size=geometry.page_size,
            row_ends=self._row_ends,
        )  # fmt: skip
        width = geometry.heads * geometry.head_dim
        spec = TensorSpec((rows, geometry.top_k), torch.int32)
        at = geometry.device.answers_at(step % geometry.slots)
        answers = self._bank.memories[ANSWERS].tensor(at, spec.byte_size, spec, "answers")
        q = self._staged("q", step, (rows, width), torch.uint8)
        weights = self._staged("weights", step, (rows, geometry.heads), torch.float32)
        for ordinal, layer in enumerate(geometry.layers):
            kind = Gate.LAYER if ordinal else Gate.FIRST_LAYER
            self._gate(kind, ordinal, step, bound)
            enqueue_step(
                q[: plan.rows].unflatten(1, (geometry.heads, -1)), weights[: plan.rows],
                self._steps.k_caches[layer], self._inputs.seq_lens[: plan.requests],
                self._inputs.block_table[: plan.requests], geometry.top_k,
                decode_requests=plan.decode_requests, rows_per_decode=plan.rows_per_decode,
                offsets=offsets, length_bounds=[plan.max_length] * plan.requests,
                row_ends=self._row_ends[: plan.rows], out=answers[: plan.rows],
                enabled=memory.enabled,
            )  # fmt: skip
            self._done(ordinal, step)

    def _gate(self, kind: Gate, ordinal: int, step: int, bound: int) -> None:
        slot = step % self._geometry.slots
        gate(self._memory, kind, slot=slot, ordinal=ordinal, bound=bound)

    def _done(self, ordinal: int, step: int) -> None:
        done(self._memory, ordinal, step % self._geometry.slots)


class SleepingStandIn(StandIn):
    """A service whose stream sleeps until the worker's flags wake it.

    Args:
        flags: address of the flag block.
    """

    def __init__(self, steps: GpuSteps, attachment: GpuAttachment, flags: int) -> None:
        self._flags, self._layout = flags, FlagLayout(len(steps.geometry.layers))
        super().__init__(steps, attachment)

    def _gate(self, kind: Gate, ordinal: int, step: int, bound: int) -> None:
        if bound:
            layout = self._layout
            word = layout.published if kind == Gate.PUBLISHED else layout.request(ordinal)
            wait_at_least(self._stream.cuda_stream, self._flags + word, step)
        super()._gate(kind, ordinal, step, 0)

    def _done(self, ordinal: int, step: int) -> None:
        super()._done(ordinal, step)
        answer = self._flags + self._layout.answer(ordinal)
        write_word(self._stream.cuda_stream, answer, Answer.ANSWERED)
