"""One step, layer by layer: stage, ring, wait, and hand back exactly once.

The service never writes memory that attention reads: `hand_back` is the only writer of the
caller's indices, from the answer slot if the answer came, else from a private buffer that the
fallback filled.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from types import TracebackType
from typing import NamedTuple, Self

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.attachment import Attachment
from indexer_client.errors import IndexerError
from indexer_client.inputs import Fallback, StepInputs
from indexer_client.remote_traces import lost_service_stages
from indexer_client.selection_stamps import Selection, SelectionStamps
from indexer_client.staging import answers, check_tensors, publish, request, stage_layer
from indexer_client.statistics import Statistics
from indexer_client.step_findings import WorkerFindings
from indexer_client.waiting import WaitEnd, wait_for_answer
from indexer_client.worker_traces import EndedStep, WorkerTraces
from ipc_handoff.generations import Generation
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.stages import WorkerStage
from ipc_handoff.stamps import StampRing
from ipc_handoff.telemetry.attributes import Attributes
from ipc_handoff.telemetry.log_ids import log_lines_of
from ipc_handoff.telemetry.step_trace import StepTrace

_NONE = -1


class Source(Enum):
    """Where a layer's selection came from."""

    SERVICE = "service"
    INLINE = "inline"


class Begun(NamedTuple):
    """What a step gets when it is entered."""

    number: int
    attachment: Attachment | None
    trace: StepTrace | None


class Step:
    """Made by `Session.step`; a context manager.

    Args:
        layers: layer ids that will be asked for, in order.
        private: int32 [max_rows, top_k], where the fallback writes.
        findings: what detectors say goes there.
        selections: of the session.
        begin: called on entering; gives what the step has of its own. Raises RuntimeError
            while another step is open.
        on_end: called on leaving.

    Attributes:
        number: of the step; 0 before it is entered.
    """

    def __init__(
        self,
        *,
        inputs: StepInputs,
        layers: Sequence[int],
        geometry: HandoffGeometry,
        fallback: Fallback,
        private: torch.Tensor,
        stamps: StampRing,
        statistics: Statistics,
        wait_bound: float,
        traces: WorkerTraces | None,
        findings: WorkerFindings,
        selections: SelectionStamps,
        begin: Callable[[], Begun],
        on_end: Callable[[], None],
    ) -> None:
        self.number = 0
        self.inputs = inputs
        self._geometry = geometry
        self._ordinals = {layer: i for i, layer in enumerate(geometry.layers)}
        self._pending = list(layers)
        self._attachment: Attachment | None = None
        self._fallback = fallback
        self._private = private[: inputs.rows]
        self._stamps = stamps
        self._statistics = statistics
        self._wait_bound = wait_bound
        self._traces = traces
        self._findings = findings
        self._selections = selections
        self._trace: StepTrace | None = None
        self._log_lines = ExitStack()
        self._of_layers: dict[int, Attributes] = {}
        self._begin = begin
        self._on_end = on_end
        # Turns False when this step's remaining layers must be computed inline.
        self._remote = False
        # Turns True when the attachment ended because of this step: the service tells no more.
        self._lost = False

    def __enter__(self) -> Self:
        self.number, self._attachment, self._trace = self._begin()
        if self._trace is not None:
            self._log_lines.enter_context(log_lines_of(self._trace.context))
        try:
            self._post()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def _post(self) -> None:
        self._stamps.begin(self.number)
        self._findings.inputs(self.number, self._epoch, self.inputs, self._geometry.page_size)
        if self._attachment is not None:
            self._remote = True
            try:
                self._attachment.plans.post(self._plan(self._attachment))
            except IndexerError as error:
                self._go_inline(f"plan: {error}")
            else:
                publish(self._attachment, self.number, self.inputs)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._statistics.steps += 1
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        try:
            self._on_end()
        finally:
            self._log_lines.close()
            if self._traces is not None and self._trace is not None:
                self._end_trace(self._traces, self._trace, error)

    def _end_trace(
        self, traces: WorkerTraces, trace: StepTrace, error: BaseException | None
    ) -> None:
        attachment = self._attachment
        if attachment is not None:
            if self._lost:
                # The service will not export this step any more: its stages are read from the
                # shared block, which outlives it.
                trace.event("detached", {"dsa.reason": attachment.detached_because})
                trace.keep()
                times = attachment.bank.control.service_stamps.read(self.number)
                if times is None:
                    self._statistics.lost_stamps += 1
                else:
                    lost_service_stages(trace, self._geometry, self.number, attachment.epoch, times)
            else:
                attachment.remote_traces.add(self.number, trace)
        trace.end(error)
        traces.end(EndedStep(self.number, trace, attachment, self._of_layers))

    def _plan(self, attachment: Attachment) -> pb.StepPlan:
        plan = self.inputs.plan(self.number, attachment.epoch, self._pending)
        if self._trace is not None:
            plan.trace.CopyFrom(self._trace.context)
        return plan

    def select(
        self, layer: int, q: torch.Tensor, weights: torch.Tensor, *, out: torch.Tensor
    ) -> Source:
        """Select this layer's tokens: from the service, or inline if it does not answer.

        Args:
            layer: the next one of the step's layers.
            q: e4m3 [rows, heads, head_dim] (float8_e4m3fn or its bytes).
            weights: float32 [rows, heads].
            out: int32 [rows, top_k]; request-local indices, -1 at the tail.

        Raises:
            ValueError: another layer, or a tensor of another shape or dtype.
        """
        if not self._pending or layer != self._pending[0]:
            raise ValueError(f"layer: {layer}, the plan goes on with {self._pending[:1]}")
        check_tensors(self._geometry, self.inputs.rows, q, weights, out)
        self.stage(layer, q, weights)
        answered = self.wait(layer)
        if not answered:
            self.compute_inline(layer, q, weights)
        return self.hand_back(layer, answered, out)

    def stage(self, layer: int, q: torch.Tensor, weights: torch.Tensor) -> None:
        """Put q and weights where the service reads them, then ring."""
        ordinal = self._ordinals[layer]
        self._stamp(ordinal, WorkerStage.STAGE_BEGUN)
        attachment = self._attachment if self._remote else None
        if attachment is not None:
            stage_layer(attachment, self.number, ordinal, q, weights)
        # Before the bell: what it causes must not look earlier than it.
        self._stamp(ordinal, WorkerStage.REQUEST_RUNG)
        if attachment is not None:
            request(attachment, self.number, ordinal)

    def wait(self, layer: int) -> bool:
        """Wait for the answer, within the bound; False: compute the layer inline."""
        ordinal = self._ordinals[layer]
        if self._remote and self._attachment is not None:
            end = wait_for_answer(self._attachment, ordinal, self.number, self._wait_bound)
            if end is not WaitEnd.ANSWERED:
                self._findings.wait_ended(self.number, self._epoch, layer, end.value)
            elif self._is_stale(self._attachment, ordinal):
                self._remote = False
            if end is WaitEnd.CANCELLED:
                # The service is well and says that it touches nothing of this step any more.
                self._remote = False
                self._statistics.cancelled_steps += 1
            elif end is not WaitEnd.ANSWERED:
                self._go_inline(f"step {self.number}, layer {layer}: {end.value}")
        self._stamp(ordinal, WorkerStage.WAIT_ENDED)
        return self._remote

    def compute_inline(self, layer: int, q: torch.Tensor, weights: torch.Tensor) -> None:
        """Let the fallback fill the private buffer, after a wait that ended without an answer."""
        self._fallback(layer, q, weights, self.inputs, self._private)

    def hand_back(self, layer: int, answered: bool, out: torch.Tensor) -> Source:
        """Write the selection into `out`: the only place that does."""
        self._pending.remove(layer)
        if answered and self._attachment is not None:
            self._copy_answer(self._attachment, layer, out)
            self._statistics.answered_layers += 1
        else:
            out.copy_(self._private)
            self._statistics.inline_layers += 1
        if self._findings.checks_shared_indices:
            self._selections.stamp(out, Selection(self.number, layer))
        self._stamp(self._ordinals[layer], WorkerStage.HANDED_BACK)
        source = Source.SERVICE if answered else Source.INLINE
        if self._trace is not None:
            self._of_layers[layer] = {"dsa.source": source.value}
        return source

    def share(self, layer: int, indices: torch.Tensor) -> bool:
        """Before a layer without an indexer attends to what an earlier one of this step selected.

        Args:
            layer: the one that shares; its id is for findings.
            indices: int32 [rows, top_k], the buffer that was `out` of that selection.

        Returns:
            whether it holds this step's selection. If not, its rows are -1 now, and that is a
            finding.
        """
        if not self._findings.checks_shared_indices:
            return True
        held = self._selections.of(indices)
        if held is not None and held.step == self.number:
            return True
        indices.fill_(_NONE)
        self._findings.shared_index_leak(self.number, self._epoch, layer, held)
        return False

    def _is_stale(self, attachment: Attachment, ordinal: int) -> bool:
        """Whether the answer that was rung is another's: the rest of the step is inline then."""
        if not self._findings.checks_generations:
            return False
        seen = attachment.bank.control.generations.answers.of(self.number)
        if seen == Generation(self.number, ordinal):
            return False
        self._findings.stale_answer(self.number, attachment.epoch, ordinal, seen)
        return True

    def _copy_answer(self, attachment: Attachment, layer: int, out: torch.Tensor) -> None:
        """If another answer comes over it meanwhile, what was copied is not to be trusted."""
        out.copy_(answers(attachment, self.number, self.inputs.rows))
        if not self._findings.checks_generations:
            return
        seen = attachment.bank.control.generations.answers.of(self.number)
        ordinal = self._ordinals[layer]
        if seen != Generation(self.number, ordinal):
            out.fill_(_NONE)
            self._findings.overwritten_answer(self.number, attachment.epoch, ordinal, seen)

    @property
    def _epoch(self) -> int:
        return self._attachment.epoch if self._attachment is not None else 0

    @property
    def trace_id(self) -> str:
        """Hexadecimal; empty if the step is not traced."""
        return self._trace.trace_id if self._trace is not None else ""

    @contextmanager
    def attending(self, layer: int) -> Iterator[None]:
        """Stamp the attention that uses this layer's selection."""
        self._stamp(self._ordinals[layer], WorkerStage.ATTEND_BEGUN)
        yield
        self._stamp(self._ordinals[layer], WorkerStage.ATTENDED)

    def _stamp(self, ordinal: int, stage: WorkerStage) -> None:
        self._stamps.stamp(self.number, ordinal, stage)

    def _go_inline(self, reason: str) -> None:
        self._remote = False
        if self._attachment is not None:
            self._lost = True
            self._attachment.detach(reason)
