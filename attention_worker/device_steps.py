"""Steps of a worker on a GPU: what happens before a forward, and in each of its layers."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention_worker.device_findings import DeviceFindings
from attention_worker.device_handoff import DeviceHandoff
from attention_worker.device_traces import DeviceTraces, HostStamps
from attention_worker.inline_kernels import InlineKernels
from attention_worker.placed import check_inputs, check_placed
from attention_worker.step_shape import StepShape
from indexer_client.attachment import Attachment, AttachRequest
from indexer_client.errors import IndexerError
from indexer_client.inputs import StepInputs
from indexer_client.staging import check_tensors
from indexer_client.statistics import Statistics
from indexer_client.step import Begun
from indexer_client.worker_session import WorkerSession
from ipc_handoff.banks import BankPool
from ipc_handoff.findings import FindingListener
from ipc_handoff.kernels.found import Found
from ipc_handoff.stamps import StepTimes
from ipc_handoff.telemetry.log_ids import log_lines_of
from ipc_handoff.telemetry.metrics import Metrics


class DeviceSteps(WorkerSession):
    """`begin_step` runs eagerly before every forward and never waits; `select` runs in the
    forward and can be captured: a graph stays valid whatever becomes of the service.

    Args:
        request, pool, refusal, prepare_thread, findings: as for `WorkerSession`.
        inline: computes what the service does not answer.
        handoff: the way to the service; None: there will never be one.
        device: of the worker.
        metrics: as for `WorkerSession`.
    """

    def __init__(
        self,
        request: AttachRequest,
        pool: BankPool,
        inline: InlineKernels,
        handoff: DeviceHandoff | None,
        *,
        device: torch.device,
        metrics: Metrics | None = None,
        refusal: IndexerError | None = None,
        prepare_thread: Callable[[], None] = lambda: None,
        findings: FindingListener | None = None,
    ) -> None:
        stamps = HostStamps(handoff.counts) if handoff is not None else None
        super().__init__(request, pool, stamps, metrics, refusal, prepare_thread, findings)
        self._inline = inline
        self._handoff = handoff
        self._device = device
        self._ordinals = {layer: i for i, layer in enumerate(self.geometry.layers)}
        self._shape: StepShape | None = None
        found = Found(device) if handoff is None else handoff.found
        self._device_findings = DeviceFindings(self._findings, found)
        if handoff is not None:
            handoff.follow(inline.begun)
        self._device_traces: DeviceTraces | None = None
        if self._traces is not None or self._metrics is not None:
            self._device_traces = DeviceTraces(self._traces, self._metrics, stamps)
        self._cancelled_told = 0

    def start(self) -> None:
        """Begin to look for a service. Once in a session's life; entering does it too."""
        if self._handoff is not None:
            self._handoff.start()
        super().start()

    def close(self) -> None:
        """End in good order; leaving the `with` block does it too. A second time does nothing.

        Waits for the current stream. Graphs that hold layers may be replayed afterwards, inline,
        for as long as this object lives.
        """
        self._check_process()
        if self._handoff is not None:
            self._handoff.close()
        self._device_findings.tell(self.epoch or 0)
        if self._device_traces is not None:
            self._device_traces.close()
        super().close()

    @property
    def statistics(self) -> Statistics:
        """Waits for the device for a moment, beside the running step. Not on the hot path."""
        found = super().statistics
        found = replace(found, steps=self._steps)
        if self._handoff is None:
            return found
        counts = self._handoff.counts
        answered, inline = counts.layers()
        return replace(
            found,
            answered_layers=answered,
            inline_layers=inline,
            cancelled_steps=counts.cancelled_steps(),
            lost_stamps=found.lost_stamps + counts.lost + self._lost_traces,
        )

    @property
    def _lost_traces(self) -> int:
        return 0 if self._device_traces is None else self._device_traces.lost

    def stamps(self, step: int) -> StepTimes | None:
        """Times [layers][WorkerStage] of a finished step, ns of the GPU's clock; 0: not reached.

        None if they were overwritten (and counted), or the step was never published. Waits for
        the device for a moment: not on the hot path.
        """
        return self._handoff.counts.stamps(step) if self._handoff is not None else None

    def warm_up(self, next_n: Sequence[int] = (1,)) -> None:
        """Make every kernel of the hand-over, and run it once where nobody listens.

        Before `start` and the first capture. What computes selections has a warm-up of its own.

        Args:
            next_n: rows of a decode request, all that occur.
        """
        device, geometry = self._device, self.geometry
        nothing = StepInputs(
            query_start=torch.arange(2, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(1, dtype=torch.int32, device=device),
            block_table=torch.zeros((1, 1), dtype=torch.int32, device=device),
            rows=1,
            decode_requests=1,
            rows_per_decode=1,
            max_length=1,
            exact_seq_lens=(0,),
            exact_query_start=(0, 1),
        )
        if self._handoff is not None:
            self._handoff.warm_up(nothing)
        row = torch.zeros(1, dtype=torch.int64, device=device)
        for inputs in (nothing, replace(nothing, positions=row, slots=row - 1)):
            for is_posted in (True, False):
                self._inline.take(inputs, 0, self._device_findings.looks(is_posted))
        for each in next_n:
            for requests in (1, 2, 4, 8, 16):
                rows = requests * each
                if rows <= geometry.max_rows and requests <= geometry.max_requests:
                    self.begin_inline(rows, each)
                    self._select_zeros(rows)
        self._shape = None

    def _select_zeros(self, rows: int) -> None:
        geometry, device = self.geometry, self._device
        width = (rows, geometry.heads, geometry.head_dim)
        q = torch.zeros(width, dtype=torch.uint8, device=device)
        weights = torch.zeros((rows, geometry.heads), device=device)
        out = torch.empty((rows, geometry.top_k), dtype=torch.int32, device=device)
        for layer in geometry.layers[:2]:  # the first one, and any other
            self.select(layer, q, weights, out)

    def begin_step(self, inputs: StepInputs) -> int:
        """Make the next forward on the current stream a step; its number.

        Eager, once before each forward, outside of any capture; never waits for the device.

        Args:
            inputs: tensors on the worker's device, rows contiguous; `exact_query_start` is needed.

        Raises:
            ValueError: they do not fit the agreed geometry, or lie elsewhere; names the field.
        """
        self._check_process()
        inputs.check(self.geometry)
        check_inputs(inputs, self._device)
        shape = StepShape.of(inputs)
        self._record(inputs, self.geometry.layers)
        if self._device_traces is not None:
            self._device_traces.end_step()
        self.look()
        before = self._attachment
        begun = self._next_step(inputs)
        is_posted = False
        if self._handoff is not None:
            if begun.attachment is not before:
                self._handoff.exchanged(before, begun.attachment)
            is_posted = self._publish(self._handoff, begun, inputs)
        self._inline.take(inputs, begun.number, self._device_findings.looks(is_posted))
        if self._device_traces is not None:
            self._device_traces.begin_step(begun)
        self._shape = shape
        return begun.number

    def begin_inline(self, rows: int, rows_per_decode: int = 1) -> None:
        """The next forwards are no steps: a capture, a warm-up, a dummy run.

        Nothing is enqueued. They compute inline with whatever lengths the last step had.

        Raises:
            ValueError: rows are left over, or there are too many.
        """
        self._check_process()
        self._shape = StepShape.of_decodes(rows, rows_per_decode, self.geometry.max_context)

    def select(
        self, layer: int, q: Tensor, weights: Tensor, out: Tensor, *, first: bool | None = None
    ) -> None:
        """Enqueue the selection of one layer of the running forward; never waits.

        Args:
            layer: id; layers come in the geometry's order.
            q: e4m3 [T, heads, head_dim] (float8_e4m3fn or its bytes), rows contiguous; T may be
                more than the step's rows.
            weights: fp32 [T, heads], rows contiguous.
            out: int32 [T, top_k], rows contiguous; request-local indices, -1 at the tail. Rows
                behind the step's get -1.
            first: it is the forward's first layer that has an indexer; by default the geometry's
                first one is.

        Raises:
            ValueError: another layer, a tensor of another shape, dtype, device or stride, or a
                capture of a forward that is not of decodes only.
        """
        if layer not in self._ordinals:
            known = ", ".join(map(str, self.geometry.layers))
            raise ValueError(f"layer: {layer} has no indexer (fix: one of {known})")
        check_tensors(self.geometry, len(q), q, weights, out)
        for name, tensor in (("q", q), ("weights", weights), ("out", out)):
            check_placed(name, tensor, self._device)
        shape = self._shape_of_forward(len(q), q.is_cuda)
        if self._handoff is None:
            self._inline.select(layer, q, weights, shape, out)
            return
        ordinal = self._ordinals[layer]
        self._handoff.layer(
            ordinal,
            q.view(torch.uint8).flatten(1),
            weights,
            out,
            first=ordinal == 0 if first is None else first,
            inline=self._inline.layer(layer, q, weights, shape, out),
        )

    def share(self, layer: int, indices: Tensor) -> None:
        """Enqueue a look, before a layer without an indexer attends to an earlier one's selection.

        If no layer has selected since the step began, the rows become -1, and that is a finding.
        Nothing is looked at where there will never be a service.

        Args:
            layer: id of the layer that selects.
            indices: int32 [T, top_k], rows contiguous, the buffer that was `out` of all selections.

        Raises:
            ValueError: another layer, or the tensor lies elsewhere.
        """
        if layer not in self._ordinals:
            known = ", ".join(map(str, self.geometry.layers))
            raise ValueError(f"layer: {layer} has no indexer (fix: one of {known})")
        check_placed("indices", indices, self._device)
        if self._handoff is not None:
            self._handoff.share(self._ordinals[layer], indices)

    def _shape_of_forward(self, rows: int, is_cuda: bool) -> StepShape:
        shape = self._shape
        if shape is None or rows < shape.rows or rows > self.geometry.max_rows:
            found = "no step" if shape is None else f"a step of {shape.rows} rows"
            raise ValueError(
                f"q: {rows} rows after {found}, at most {self.geometry.max_rows} (fix: begin_step "
                "or begin_inline before the forward, with its rows)"
            )
        if is_cuda and torch.cuda.is_current_stream_capturing():
            # A graph outlives the step: it must fit every later one of its size.
            if not shape.is_decode:
                raise ValueError(
                    "capture: the forward has prefill requests (fix: begin_inline with decode "
                    "rows before a capture; prefill and mixed steps run eagerly)"
                )
            return StepShape.of_decodes(rows, shape.rows_per_decode, self.geometry.max_context)
        return shape

    def look(self) -> None:
        """Tell what was found so far, as the next step would; never waits. Between steps."""
        self._check_process()
        self._device_findings.tell(self.epoch or 0)
        self._look_after_attachment()

    def _look_after_attachment(self) -> None:
        """At the end of a step: what device and service have told about the attachment."""
        attachment = self._attachment
        if attachment is None or self._handoff is None:
            return
        self._read_reports()
        why = self._handoff.why_over(attachment)
        if why is not None:
            self._findings.wait_ended(self._steps, attachment.epoch, None, why)
            attachment.detach(why)
        self._tell_of_cancelled(attachment)
        self._handoff.leave(attachment)

    def _tell_of_cancelled(self, attachment: Attachment) -> None:
        """Steps that the service gave up since the last look: the device counts them."""
        assert self._handoff is not None
        cancelled = self._handoff.cancelled_steps
        if cancelled > self._cancelled_told:
            how = f"the service gave up {cancelled - self._cancelled_told} steps"
            self._findings.wait_ended(self._steps, attachment.epoch, None, how)
        self._cancelled_told = cancelled

    def _publish(self, handoff: DeviceHandoff, begun: Begun, inputs: StepInputs) -> bool:
        """Send a step's plan and publish it; False: the step is inline."""
        attachment = begun.attachment
        if attachment is None or not self._posted(attachment, begun, inputs):
            handoff.skip()
            return False
        handoff.publish(attachment, begun.number, inputs)
        return True

    def _posted(self, attachment: Attachment, begun: Begun, inputs: StepInputs) -> bool:
        """Send the plan; False: the step is inline, and the attachment over."""
        plan = inputs.plan(begun.number, attachment.epoch, self.geometry.layers)
        if begun.trace is not None:
            plan.trace.CopyFrom(begun.trace.context)
        with log_lines_of(plan.trace):
            try:
                attachment.plans.post(plan)
            except IndexerError as error:
                attachment.detach(f"plan: {error}")
                return False
        return True
