"""The worker's kernels of the hand-over with what the host must know about them.

Attachments are numbered from 1 for the device, which compares the numbers and never sees an
`Attachment`. One thread calls everything here.
"""

from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.device_counts import DeviceCounts
from attention_worker.watchdog import Watchdog
from attention_worker.worker_banks import WorkerBank
from indexer_client.attachment import Attachment
from indexer_client.inputs import StepInputs
from ipc_handoff.kernels.hand_back import KINDS, hand_back
from ipc_handoff.kernels.publish import forget_armed, publish
from ipc_handoff.kernels.share import share
from ipc_handoff.kernels.stage import stage
from ipc_handoff.kernels.wait import FEW_ROWS, wait
from ipc_handoff.kernels.words import Told, WaitEnd
from ipc_handoff.kernels.worker_memory import WorkerMemory

_NANOSECONDS = 1_000_000_000
_ENDS = {
    WaitEnd.STALLED: "no progress within the bound",
    WaitEnd.ABORTED: "the attachment was ended while it waited",
}


class Inline(Protocol):
    """Computes a layer here. All arguments: int32 [1] on the device; with 0 nothing is computed."""

    def before_the_wait(self, detached: Tensor, *, first: bool) -> None:
        """Enqueue what computes it while no step is under way.

        Args:
            first: staging of this layer decides about `detached`; it is final before, otherwise.
        """

    def behind_the_wait(self, rescued: Tensor, inline: Tensor) -> None:
        """Enqueue what computes it when an answer did not come.

        Args:
            rescued: 1 then alone.
            inline: 1 also while no step is under way, for what enqueues nothing before the wait.
        """

    def answer_or_rescue(self, memory: WorkerMemory, ordinal: int) -> bool:
        """Enqueue the same and the hand-back in one launch; False: nothing is enqueued."""


class DeviceHandoff:
    """Made before the first capture: graphs hold the addresses of its memory.

    Args:
        memory: of the worker.
        wait_bound: seconds without progress of the service after which a wait ends.

    Attributes:
        counts: what the kernels count. found: where they tell what contradicts itself.
    """

    def __init__(self, memory: WorkerMemory, wait_bound: float) -> None:
        self._memory = memory
        self._bound = round(wait_bound * _NANOSECONDS)
        self._watchdog = Watchdog(memory.order)
        self._number = 0
        self._may_be_armed = False
        self._told: npt.NDArray[np.int64] = memory.told.numpy()
        self.counts = DeviceCounts(memory)
        self.found = memory.found

    def follow(self, begun: Tensor) -> None:
        """Before the first capture: int64 [1] on the device, see `WorkerMemory.begun`."""
        self._memory.begun = begun

    def warm_up(self, inputs: StepInputs) -> None:
        """Make the kernels that publish and hand back. Before `start`: they go by an attachment
        that none is, which the device takes for a lost one, and find no answer.
        """
        publish(
            self._memory,
            inputs.query_start,
            inputs.seq_lens,
            inputs.block_table,
            step=0,
            attachment=0,
            staging=0,
            answers=0,
            rows=inputs.rows,
            max_length=inputs.max_length,
        )
        memory = self._memory
        for rows in KINDS:
            shape = (min(rows, memory.geometry.max_rows), memory.geometry.top_k)
            out = torch.empty(shape, dtype=torch.int32, device=memory.device)
            hand_back(memory, out, ordinal=0)
        self.share(0, out)

    def start(self) -> None:
        self._watchdog.start()

    def close(self) -> None:
        """No wait for an answer goes on, and the next forward works inline.

        Waits for the current stream: afterwards nothing uses a bank.
        """
        self._watchdog.end(self._number)
        self.skip()
        if self._memory.is_cuda:
            torch.cuda.current_stream(self._memory.device).synchronize()
        self._watchdog.close()

    def why_over(self, attachment: Attachment) -> str | None:
        """Why the attachment in use is over, if device, watchdog or service say so."""
        told = self._told
        if told[Told.LOST] == self._number:
            layer = self._memory.geometry.layers[int(told[Told.LAYER])]
            end = _ENDS[WaitEnd(int(told[Told.END]))]
            return f"step {int(told[Told.STEP])}, layer {layer}: {end}"
        if self._watchdog.is_dead(self._number):
            return "the service's process is dead"
        if attachment.bells.is_drained():
            return "the service has ended the session"
        return None

    @property
    def cancelled_steps(self) -> int:
        """Steps that services gave up, as far as the device has told."""
        return int(self._told[Told.CANCELLED])

    def leave(self, attachment: Attachment) -> None:
        """Before the step boundary: what was enqueued so far may use its bank."""
        _bank(attachment).mark()

    def exchanged(self, before: Attachment | None, after: Attachment | None) -> None:
        """At the step boundary: the attachment that steps are published for has changed."""
        if before is not None:
            self._watchdog.end(self._number)
        if after is not None:
            self._number += 1
            self._watchdog.watch(self._number, after.watch)

    def publish(self, attachment: Attachment, step: int, inputs: StepInputs) -> None:
        """Stage what a step's layers share, and arm it: the next forward takes it."""
        bank = _bank(attachment)
        publish(
            self._memory,
            inputs.query_start,
            inputs.seq_lens,
            inputs.block_table,
            step=step,
            attachment=self._number,
            staging=bank.staging_address,
            answers=bank.answers_address,
            rows=inputs.rows,
            max_length=inputs.max_length,
        )
        self._may_be_armed = True

    def skip(self) -> None:
        """The next forward works inline, also if no forward took the last publication."""
        if self._may_be_armed:
            forget_armed(self._memory)
            self._may_be_armed = False

    def share(self, ordinal: int, indices: Tensor) -> None:
        """Enqueue a look at what a layer without an indexer attends to; can be captured.

        Args:
            ordinal: of the layer whose selection it shares; indices: int32 [T, top_k].
        """
        if self._memory.checks_shared_indices:
            share(self._memory, indices, ordinal=ordinal)

    def layer(
        self,
        ordinal: int,
        q: Tensor,
        weights: Tensor,
        out: Tensor,
        *,
        first: bool,
        inline: Inline,
    ) -> None:
        """Enqueue one layer; can be captured.

        Args:
            q: uint8 [T, heads * head_dim]; weights: fp32 [T, heads]; out: int32 [T, top_k].
            first: it is the forward's first layer.
            inline: enqueues what computes the layer here, into `out`.
        """
        memory = self._memory
        few = len(out) <= FEW_ROWS
        stage(memory, q, weights, ordinal=ordinal, first=first)
        self._ask(ordinal)
        inline.before_the_wait(memory.detached, first=first)
        self._sleep(ordinal)
        wait(memory, ordinal=ordinal, bound=self._bound, out=out if few else None)
        if few:
            inline.behind_the_wait(memory.rescued, memory.inline)
        elif not inline.answer_or_rescue(memory, ordinal):
            inline.behind_the_wait(memory.rescued, memory.inline)
            hand_back(memory, out, ordinal=ordinal)

    def _ask(self, ordinal: int) -> None:
        """What else the service must be told of a staged layer."""

    def _sleep(self, ordinal: int) -> None:
        """What must come before the kernel that waits."""


def _bank(attachment: Attachment) -> WorkerBank:
    """A worker on a GPU has no other banks."""
    return cast(WorkerBank, attachment.bank)
