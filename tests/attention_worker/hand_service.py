"""A worker's device steps on the CPU, with a service whose words are set by hand.

For Triton's interpreter: no kernel runs beside another, so that the service has its turn between a
layer's stage and its wait. It answers rows that say who made them: no inline row looks like them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import patch

import torch

from attention_worker import device_handoff
from attention_worker.device_handoff import DeviceHandoff
from attention_worker.device_steps import DeviceSteps
from attention_worker.inline_kernels import InlineKernels
from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import ClientSettings, ServiceUnavailable, StepInputs
from indexer_client.attachment import AttachRequest, worker_identity
from ipc_handoff.banks import Bank, BankPool
from ipc_handoff.control import WorkerControl
from ipc_handoff.device_layout import DEVICE_LINE, AnswersWord, SlotLine, StagingWord
from ipc_handoff.doorbells import WorkerBells
from ipc_handoff.generations import Generation
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.processes import ProcessWatch
from tests.support.findings import Kept

POISON = 0xAB
"""Banks are full of it."""


class HandBank(Bank):
    """A bank in the CPU's memory, in the layout of a GPU's."""

    def __init__(self, geometry: HandoffGeometry, number: int) -> None:
        self.number, self.memories = number, {}
        self.layout, self.slots = geometry.device, geometry.slots
        self.staging, self.answers = (
            torch.full((size + DEVICE_LINE,), POISON, dtype=torch.uint8)
            for size in (self.layout.staging_size, self.layout.answers_size)
        )
        self.staging_address, self.answers_address = (
            -(-tensor.data_ptr() // DEVICE_LINE) * DEVICE_LINE
            for tensor in (self.staging, self.answers)
        )
        self.control = WorkerControl(memoryview(bytearray(geometry.control.size)), geometry)
        self.marks = 0
        self.start(1)

    def start(self, epoch: int) -> None:
        self._words(self.staging, self.staging_address, self.layout.staging_slots).zero_()
        self._words(self.answers, self.answers_address, self.layout.answers_slots).zero_()
        self.control.start(epoch)

    def mark(self) -> None:
        self.marks += 1

    def _words(self, tensor: torch.Tensor, address: int, size: int) -> torch.Tensor:
        begin = address - tensor.data_ptr()
        return tensor[begin : begin + size].view(torch.int64)

    def staging_word(self, word: int) -> int:
        return int(self._words(self.staging, self.staging_address + word * DEVICE_LINE, 8))

    def set_answers_word(self, word: int, value: int) -> None:
        self._words(self.answers, self.answers_address + word * DEVICE_LINE, 8)[0] = value

    def staged(self, step: int, area: str, count: int) -> torch.Tensor:
        """The first bytes of an area of the step's slot."""
        at = self.staging_address + self.layout.staging_at(step % self.slots)
        at += getattr(self.layout, area) - self.staging.data_ptr()
        return self.staging[at : at + count]

    def generation(self, step: int) -> torch.Tensor:
        """Of the step's answer slot, int64 [1]."""
        at = self.answers_address + self.layout.answers_at(step % self.slots)
        return self._words(self.answers, at + SlotLine.LAYER * DEVICE_LINE, 8)

    def set_generation(self, step: int, ordinal: int) -> None:
        self.generation(step).fill_(Generation(step, ordinal).word)

    def answer_slot(self, step: int, rows: int, top_k: int) -> torch.Tensor:
        at = self.answers_address + self.layout.answers_at(step % self.slots)
        at -= self.answers.data_ptr()
        size = rows * top_k * 4
        return self.answers[at : at + size].view(torch.int32).view(rows, top_k)


class HandAttachment:
    """What `DeviceSteps` uses of an `Attachment`."""

    def __init__(self, bank: HandBank, epoch: int) -> None:
        self.bank, self.epoch = bank, epoch
        self.watch = ProcessWatch(0)
        self.plans = self
        self.posted: list[pb.StepPlan] = []
        self.detached_because = ""
        self.is_full = False

    @property
    def bells(self) -> WorkerBells:
        return self.bank.control.bells

    def post(self, plan: pb.StepPlan) -> None:
        if self.is_full:
            raise ServiceUnavailable("plan ring: full")
        self.posted.append(plan)

    def reports(self) -> list[pb.StepReport]:
        return []

    def detach(self, reason: str) -> None:
        self.detached_because = self.detached_because or reason


class HandCaretaker:
    """Gives what a test has put into `ready`."""

    attachments = detachments = lost_stamps = 0
    last_error = None
    reasons = ()

    def __init__(self) -> None:
        self.ready: HandAttachment | None = None
        self.ended: list[HandAttachment] = []

    def exchange(self, current: HandAttachment | None) -> HandAttachment | None:
        if current is not None and current.detached_because:
            self.ended.append(current)
            current = None
        if current is None:
            current, self.ready = self.ready, None
        return current

    def close(self, current: HandAttachment | None) -> None:
        pass


Turn = Callable[[int, int], None]
"""What the service does between a layer's stage and its wait: its ordinal and the step."""


@dataclass
class HandWorker:
    """A worker on the CPU whose service is this object.

    Attributes:
        turn: what the service does; by default it answers what was rung for.
        rung: (step, ordinal) of all requests that it saw.
    """

    geometry: HandoffGeometry
    k_caches: Mapping[int, torch.Tensor]
    turn: Turn | None = None
    rung: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        cpu = torch.device("cpu")
        self.memory = WorkerMemory(self.geometry, cpu)
        self.handoff = DeviceHandoff(self.memory, wait_bound=0.0)
        self.found = Kept()
        self.steps = DeviceSteps(
            AttachRequest(
                settings=ClientSettings(address="unix:/nowhere/i.sock"),
                worker=worker_identity("hand"),
                geometry=self.geometry,
                k_caches={},
                configuration_hash="",
                tracing=None,
            ),
            BankPool(lambda number: HandBank(self.geometry, number), banks=0),
            InlineKernels(self.geometry, self.k_caches, cpu),
            self.handoff,
            device=cpu,
            findings=self.found,
        )
        self.caretaker = HandCaretaker()
        self.steps._caretaker = cast(Any, self.caretaker)
        self.attachment: HandAttachment | None = None
        self._epoch = 0

    def attach(self, bank: HandBank | None = None) -> HandAttachment:
        """From the next step on there is a service."""
        self._epoch += 1
        bank = bank or HandBank(self.geometry, self._epoch)
        self.attachment = HandAttachment(bank, self._epoch)
        self.caretaker.ready = self.attachment
        return self.attachment

    def marker(self, step: int, ordinal: int) -> int:
        """What the service's answers are made of."""
        return 1_000_000 * step + ordinal

    def answer(self, ordinal: int, step: int) -> None:
        """Answer a layer of a step, whatever was rung for."""
        assert self.attachment is not None
        bank, geometry = self.attachment.bank, self.geometry
        slot = bank.answer_slot(step, geometry.max_rows, geometry.top_k)
        slot.fill_(self.marker(step, ordinal))
        bank.set_generation(step, ordinal)
        bank.set_answers_word(AnswersWord.DONES + ordinal, step)

    def _serve(self, ordinal: int) -> None:
        if self.attachment is None:
            return
        step = self.attachment.bank.staging_word(StagingWord.REQUESTS + ordinal)
        if step and (step, ordinal) not in self.rung:
            self.rung.append((step, ordinal))
            (self.turn or self.answer)(ordinal, step)

    def forward(
        self, queries: Mapping[int, Any], rows: int, *, padding: int = 0
    ) -> dict[int, torch.Tensor]:
        """Every layer of a forward: layer -> selection, int32 [rows + padding, top_k]."""
        real = device_handoff.wait

        def served(memory: WorkerMemory, *, ordinal: int, **options: Any) -> None:
            self._serve(ordinal)
            real(memory, ordinal=ordinal, **options)

        found = {}
        with patch.object(device_handoff, "wait", served):
            for layer, query in queries.items():
                q = torch.nn.functional.pad(query.q, (0, 0, 0, 0, 0, padding))
                weights = torch.nn.functional.pad(query.weights, (0, 0, 0, padding))
                out = torch.full((rows + padding, self.geometry.top_k), -2, dtype=torch.int32)
                self.steps.select(layer, q, weights, out)
                found[layer] = out
        return found


def with_offsets(inputs: StepInputs) -> StepInputs:
    """As a GPU's worker gives them."""
    return replace(inputs, exact_query_start=inputs.query_start.tolist())


def sources(
    worker: HandWorker, case: Any, found: Mapping[int, torch.Tensor], step: int
) -> list[str]:
    """Where each layer's selection came from, or what is wrong with it."""
    told = []
    rows = case.inputs.rows
    for ordinal, (layer, out) in enumerate(found.items()):
        if not bool((out[rows:] == -1).all()):
            told.append("padding")
        elif torch.equal(out[:rows], case.expected[layer]):
            told.append("inline")
        elif bool((out[:rows] == worker.marker(step, ordinal)).all()):
            told.append("service")
        else:
            told.append(f"wrong {out[:rows, 0].tolist()}")
    return told
