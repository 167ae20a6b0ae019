"""A worker's device steps on a GPU, steps of random data, and a service in a thread beside it.

The service's thread has a stream of its own in the same process: its kernels run beside the
worker's as another process's do under MPS. It can be told to fall silent.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from attention_worker.captures import leave_captures_alone
from attention_worker.device_handoff import DeviceHandoff
from attention_worker.device_steps import DeviceSteps
from attention_worker.inline_kernels import InlineKernels
from attention_worker.step_shape import StepShape
from attention_worker.timeslice_handoff import TimesliceHandoff
from attention_worker.worker_banks import WorkerBank
from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import ClientSettings, StepInputs
from indexer_client.attachment import AttachRequest, worker_identity
from indexer_service.kernels.device_inputs import (
    DeviceInputs,
    copy_checked,
    numbers_size,
    pack_numbers,
)
from indexer_service.kernels.step import enqueue_step
from ipc_handoff.banks import ANSWERS, STAGING, BankPool
from ipc_handoff.flag_words import Answer, FlagLayout
from ipc_handoff.kernels.done import done
from ipc_handoff.kernels.gate import gate
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.words import Gate
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import TensorSpec
from ipc_handoff.stream_words import wait_at_least, write_word
from tests.attention_worker.hand_service import HandAttachment, HandCaretaker
from tests.kernels import inputs as random_inputs

GEOMETRY = HandoffGeometry(
    layers=(1, 4, 6, 9), heads=64, head_dim=128, top_k=512, page_size=64, max_rows=96,
    max_requests=16, max_context=4096, slots=2,
)  # fmt: skip
SPARE_PAGES = 8
POISON = 0xAB
GATE_BOUND = 1_000_000_000


@dataclass(frozen=True)
class GpuCase:
    """A step on the device; q, weights and expected by layer."""

    inputs: StepInputs
    q: Mapping[int, Tensor]
    weights: Mapping[int, Tensor]
    expected: Mapping[int, Tensor]


class GpuSteps:
    """Steps of one geometry. Expected selections are computed inline, apart from the worker."""

    def __init__(self, device: torch.device, geometry: HandoffGeometry = GEOMETRY) -> None:
        self.geometry, self.device = geometry, device
        source = torch.Generator().manual_seed(1)
        self.pages = geometry.table_width * geometry.max_requests + SPARE_PAGES
        one = random_inputs.k_cache(source, self.pages, geometry.page_size, geometry.head_dim)
        # As vLLM's: pages of all layers side by side.
        room = torch.zeros((self.pages, len(geometry.layers), *one.shape[1:]), dtype=torch.uint8)
        for ordinal in range(len(geometry.layers)):
            room[:, ordinal] = one[torch.randperm(self.pages, generator=source)]
        self.room = room.to(device)
        self.k_caches = {layer: self.room[:, i] for i, layer in enumerate(geometry.layers)}
        self._expected = InlineKernels(geometry, self.k_caches, device)

    def case(
        self, number: int, requests: int, *, next_n: int = 1, prefill: tuple[int, ...] = ()
    ) -> GpuCase:
        """The n-th step: so many decode requests, then one of so many rows for each prefill."""
        geometry = self.geometry
        source = torch.Generator().manual_seed(number)
        rows_of = [next_n] * requests + list(prefill)
        longest = geometry.max_context

        def length(rows: int) -> int:
            return int(torch.randint(rows, longest + 1, (), generator=source))

        lengths = [length(rows) for rows in rows_of]
        offsets = torch.tensor([0, *rows_of], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        table = torch.randperm(self.pages, generator=source)[: len(rows_of) * geometry.table_width]
        rows = int(offsets[-1])
        inputs = StepInputs(
            query_start=offsets.to(self.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            block_table=table.view(len(rows_of), -1).to(torch.int32).to(self.device),
            rows=rows,
            decode_requests=requests,
            rows_per_decode=next_n if requests else 0,
            max_length=max(lengths),
            exact_seq_lens=lengths if number % 2 else None,
            exact_query_start=offsets.tolist(),
        )
        q, weights, expected = {}, {}, {}
        self._expected.take(inputs)
        for layer in geometry.layers:
            codes = random_inputs.codes(source, rows, geometry.heads, geometry.head_dim)
            q[layer] = codes.to(self.device)
            w = torch.randn((rows, geometry.heads), generator=source)
            weights[layer] = w.to(self.device)
            expected[layer] = torch.full(
                (rows, geometry.top_k), -3, dtype=torch.int32, device=self.device
            )
            shape = StepShape.of(inputs)
            self._expected.select(layer, q[layer], weights[layer], shape, expected[layer])
        torch.cuda.synchronize()
        return GpuCase(inputs, q, weights, expected)


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
            self._done(ordinal)

    def _gate(self, kind: Gate, ordinal: int, step: int, bound: int) -> None:
        gate(self._memory, kind, ordinal=ordinal, bound=bound)

    def _done(self, ordinal: int) -> None:
        done(self._memory, ordinal)


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
        gate(self._memory, kind, ordinal=ordinal, bound=0)

    def _done(self, ordinal: int) -> None:
        done(self._memory, ordinal)
        answer = self._flags + self._layout.answer(ordinal)
        write_word(self._stream.cuda_stream, answer, Answer.ANSWERED)


@dataclass
class GpuWorker:
    """Device steps whose attachments a test makes."""

    steps: GpuSteps
    device_steps: DeviceSteps
    handoff: DeviceHandoff
    caretaker: HandCaretaker
    _banks: int = 0

    def attach(self) -> tuple[GpuAttachment, StandIn]:
        """From the next step on there is a service; its bank is poisoned."""
        self._banks += 1
        bank = WorkerBank(self.steps.geometry, self._banks, 0, 0)
        for memory in (bank.memories[STAGING], bank.memories[ANSWERS]):
            spec = TensorSpec((memory.byte_size,), torch.uint8)
            memory.tensor(0, memory.byte_size, spec, "bank").fill_(POISON)
        torch.cuda.synchronize()
        attachment = GpuAttachment(bank, self._banks)
        if isinstance(self.handoff, TimesliceHandoff):
            flags = self.handoff._mapped.address
            service: StandIn = SleepingStandIn(self.steps, attachment, flags)
        else:
            service = StandIn(self.steps, attachment)
        bank.start(self._banks)
        self.caretaker.ready = attachment
        return attachment, service


@contextmanager
def gpu_worker(
    steps: GpuSteps, wait_bound: float = 0.02, kind: type[DeviceHandoff] = DeviceHandoff
) -> Iterator[GpuWorker]:
    memory = WorkerMemory(steps.geometry, steps.device)
    handoff = kind(memory, wait_bound)
    made = DeviceSteps(
        AttachRequest(
            settings=ClientSettings(address="unix:/nowhere/i.sock"),
            worker=worker_identity("gpu"), geometry=steps.geometry, k_caches={},
            configuration_hash="", tracing=None,
        ),
        BankPool(lambda number: WorkerBank(steps.geometry, number, 0, 0), banks=0),
        InlineKernels(steps.geometry, steps.k_caches, steps.device),
        handoff,
        device=steps.device,
    )  # fmt: skip
    caretaker = HandCaretaker()
    made._caretaker = cast(Any, caretaker)
    handoff.start()
    try:
        yield GpuWorker(steps, made, handoff, caretaker)
    finally:
        made.close()


class Captured:
    """One FULL graph of all layers, of so many decode requests; padded by the steps it runs."""

    def __init__(self, indexer: DeviceSteps, steps: GpuSteps, requests: int, next_n: int) -> None:
        geometry = steps.geometry
        rows, kind = requests * next_n, {"device": steps.device}
        width = (rows, geometry.heads, geometry.head_dim)
        self.q = {layer: torch.zeros(width, dtype=torch.uint8, **kind) for layer in geometry.layers}
        self.weights = {
            layer: torch.zeros((rows, geometry.heads), **kind) for layer in geometry.layers
        }
        self.out = {
            layer: torch.full((rows, geometry.top_k), -2, dtype=torch.int32, **kind)
            for layer in geometry.layers
        }
        self._indexer = indexer
        indexer.begin_inline(rows, next_n)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self._forward()  # compiles
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._forward()

    def _forward(self) -> None:
        for layer, q in self.q.items():
            self._indexer.select(layer, q, self.weights[layer], self.out[layer])

    def replay(self, case: GpuCase) -> None:
        """Enqueue a step that was begun."""
        for layer, q in case.q.items():
            self.q[layer][: len(q)].copy_(q)
            self.weights[layer][: len(q)].copy_(case.weights[layer])
            self.out[layer].fill_(-2)
        self.graph.replay()

    def wrong(self, case: GpuCase) -> list[str]:
        """Waits, and tells each layer that is not as expected."""
        torch.cuda.synchronize()
        return wrong(case, self.out)


def wrong(case: GpuCase, found: Mapping[int, Tensor]) -> list[str]:
    """One line a layer whose rows differ, or whose padding is not -1."""
    told = []
    for layer, expected in case.expected.items():
        out, rows = found[layer], len(expected)
        bad = (out[:rows] != expected).any(1).nonzero().flatten().tolist()
        if bad:
            told.append(f"layer {layer}: rows {bad}, first {out[bad[0], :4].tolist()}")
        if bool((out[rows:] != -1).any()):
            told.append(f"layer {layer}: padding")
    return told
