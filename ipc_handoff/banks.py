"""Banks: the worker-owned memory of an attachment, and the pool they come from.

A *bank* holds control block, staging and answers. An attachment uses one bank; when it ends
without a clean close, the bank is *retired*: the old service may still write its answers
there, so nobody uses it again until that service has drained (said so in the control block)
or its process is proven dead. What a dead process had begun on a GPU may run on for a while:
banks in device memory wait for that too.

A *slot* of a bank belongs to one step (`step % slots`). Inside a step the slot's q, weights
and answers are used layer after layer: the worker stages a layer only after the last one's
answer came (or the attachment ended), so one place a slot is enough.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ipc_handoff.control import WorkerControl
from ipc_handoff.layout import Area, HandoffGeometry
from ipc_handoff.processes import ProcessWatch
from ipc_handoff.regions import HostMemory, SharedMemory, TensorSpec

CONTROL, STAGING, ANSWERS = "control", "staging", "answers"
BANK_REGIONS = (CONTROL, STAGING, ANSWERS)
K_CACHE_PREFIX = "k_cache/"


def k_cache_region(layer: int) -> str:
    """Name of the region that holds a layer's K cache."""
    return f"{K_CACHE_PREFIX}{layer}"


@dataclass(frozen=True)
class StagingSlot:
    """Inputs of one step.

    q: e4m3 [max_rows, heads, head_dim]; weights: float32 [max_rows, heads]; query_start:
    int32 [max_requests + 1]; seq_lens: int32 [max_requests], the length after the request's
    last row; block_table: int32 [max_requests, table_width].
    """

    q: torch.Tensor
    weights: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


def staging_slots(
    memory: SharedMemory, geometry: HandoffGeometry, start: int = 0
) -> list[StagingSlot]:
    """Every slot of a staging region that begins at byte `start` of `memory`."""
    g, layout = geometry, geometry.staging
    specs = {
        "q": TensorSpec((g.max_rows, g.heads, g.head_dim), torch.float8_e4m3fn),
        "weights": TensorSpec((g.max_rows, g.heads), torch.float32),
        "query_start": TensorSpec((g.max_requests + 1,), torch.int32),
        "seq_lens": TensorSpec((g.max_requests,), torch.int32),
        "block_table": TensorSpec((g.max_requests, g.table_width), torch.int32),
    }
    slots = []
    for slot in range(layout.slots):
        base = start + slot * layout.slot_size
        slots.append(
            StagingSlot(
                **{
                    name: _view(memory, layout.areas[name], base, spec)
                    for name, spec in specs.items()
                }
            )
        )
    return slots


def answer_slots(
    memory: SharedMemory, geometry: HandoffGeometry, start: int = 0
) -> list[torch.Tensor]:
    """Indices int32 [max_rows, top_k] of every slot."""
    layout = geometry.answers
    spec = TensorSpec((geometry.max_rows, geometry.top_k), torch.int32)
    return [
        _view(memory, layout.areas["indices"], start + slot * layout.slot_size, spec)
        for slot in range(layout.slots)
    ]


def _view(memory: SharedMemory, area: Area, base: int, spec: TensorSpec) -> torch.Tensor:
    return memory.tensor(base + area.offset, area.size, spec, area.name)


class Bank(ABC):
    """One bank (worker's side), made by the pool's factory.

    Attributes:
        number: of the bank in its pool.
        memories: region name -> the memory that is wholly that region.
        control: the control block, in host memory wherever the rest lies.
    """

    number: int
    memories: Mapping[str, SharedMemory]
    control: WorkerControl

    @abstractmethod
    def start(self, epoch: int) -> None:
        """Reset every word for a new attachment; nobody else may be mapped to the bank then."""

    def close(self) -> None:
        for memory in self.memories.values():
            memory.close()


def control_memory(geometry: HandoffGeometry, number: int) -> HostMemory:
    """Memory of a bank's control block."""
    return HostMemory.create(geometry.control.size, f"{CONTROL}{number}")


class HostBank(Bank):
    """A bank in host memory."""

    def __init__(self, geometry: HandoffGeometry, number: int) -> None:
        self.number = number
        control = control_memory(geometry, number)
        self.memories: dict[str, HostMemory] = {
            CONTROL: control,
            STAGING: HostMemory.create(geometry.staging.size, f"{STAGING}{number}"),
            ANSWERS: HostMemory.create(geometry.answers.size, f"{ANSWERS}{number}"),
        }
        self.control = WorkerControl(control.view(), geometry)
        self.staging = staging_slots(self.memories[STAGING], geometry)
        self.answers = answer_slots(self.memories[ANSWERS], geometry)
        self._geometry = geometry

    def start(self, epoch: int) -> None:
        self.control.start(epoch)

    def staging_of(self, step: int) -> StagingSlot:
        """The inputs of `step`."""
        return self.staging[self._geometry.staging.slot_of(step)]

    def answers_of(self, step: int) -> torch.Tensor:
        """The answers of `step`, int32 [max_rows, top_k]."""
        return self.answers[self._geometry.answers.slot_of(step)]


@dataclass
class _Retired:
    """died_at: when the writer's death was seen; None while it is not proven."""

    bank: Bank
    writer: ProcessWatch
    on_dead: Callable[[], None]
    died_at: float | None = None


class BankPool:
    """Hands out banks and takes them back when nobody can write them any more.

    Args:
        make_bank: makes the bank of a number.
        banks: how many.
        quarantine_seconds: how long a bank rests after its service died without having drained.
    """

    def __init__(
        self,
        make_bank: Callable[[int], Bank],
        banks: int = 2,
        *,
        quarantine_seconds: float = 0.0,
    ) -> None:
        self._make_bank = make_bank
        self._quarantine = quarantine_seconds
        self._free = [make_bank(number) for number in range(banks)]
        self._in_use: list[Bank] = []
        self._retired: list[_Retired] = []

    def take(self) -> Bank | None:
        """A free bank, or None: then stay inline."""
        self._reclaim()
        if not self._free:
            return None
        self._in_use.append(self._free.pop())
        return self._in_use[-1]

    def give_back(self, bank: Bank) -> None:
        """After a clean end: the service has drained.

        Raises:
            ValueError: the bank is not in use, so another attachment may have it.
        """
        self._in_use.remove(bank)
        self._free.append(bank)

    def retire(
        self, bank: Bank, writer: ProcessWatch, on_dead: Callable[[], None] = lambda: None
    ) -> None:
        """After any other end.

        Args:
            writer: the old service's process; the pool closes it.
            on_dead: called when it died without having drained, before the bank is used again.

        Raises:
            ValueError: as `give_back`.
        """
        self._in_use.remove(bank)
        self._retired.append(_Retired(bank, writer, on_dead))

    def replace(self, bank: Bank) -> None:
        """After sharing it got no answer: a service that never had it will not drain it.

        A new bank takes its place; the old one's memory goes with its last mapping.

        Raises:
            ValueError: as `give_back`.
        """
        self._in_use.remove(bank)
        bank.close()
        self._free.append(self._make_bank(bank.number))

    def _reclaim(self) -> None:
        waiting = []
        for retired in self._retired:
            if self._is_writable(retired):
                waiting.append(retired)
            else:
                retired.writer.close()
                self._free.append(retired.bank)
        self._retired = waiting

    def _is_writable(self, retired: _Retired) -> bool:
        """Whether the old service may still write its bank."""
        is_dead = retired.died_at is not None or retired.writer.is_dead()
        if retired.bank.control.bells.is_drained():  # Asked last: the dead drain no more.
            return False
        if not is_dead:
            return True
        if retired.died_at is None:
            retired.died_at = time.monotonic()
            retired.on_dead()
        return time.monotonic() < retired.died_at + self._quarantine

    @property
    def retired(self) -> int:
        self._reclaim()
        return len(self._retired)

    def close(self) -> None:
        self._reclaim()
        for retired in self._retired:
            retired.writer.close()
        for bank in self._free + self._in_use + [retired.bank for retired in self._retired]:
            bank.close()
        self._free, self._in_use, self._retired = [], [], []
