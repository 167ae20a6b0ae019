"""Steps on the CPU, one at a time: gate every layer, select, write the answer, ring.

The only place that reads the worker's staging and writes answers. A gate never waits without
a bound: it ends with its bound, with a newer step, with detachment or with closing, and what
ends it cancels the rest of the step.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.attachment import Attachment, HostViews
from indexer_service.engine import Engine, LayerInputs
from indexer_service.executor import BegunStep, StepCancelled
from indexer_service.kernels.checked_inputs import CheckedInputs
from indexer_service.plans import check_plan
from indexer_service.step_findings import ServiceFindings
from indexer_service.step_inputs import copy_inputs, k_caches_of, report_faults
from ipc_handoff.banks import StagingSlot
from ipc_handoff.detectors import NO_DETECTION, Detection
from ipc_handoff.generations import Generation
from ipc_handoff.stages import ServiceStage
from ipc_handoff.stamps import StampRing, StepTimes
from ipc_handoff.telemetry.log_ids import log_lines_of
from ipc_handoff.words import fence


class _HostStep:
    """A step that is answered when it is finished."""

    def __init__(
        self, answer: Callable[[pb.StepPlan, pb.StepReport], None], stamps: StampRing,
        plan: pb.StepPlan, report: pb.StepReport,
    ) -> None:  # fmt: skip
        self._answer, self._stamps = answer, stamps
        self._plan, self._report = plan, report

    def is_finished(self) -> bool:
        return True

    def finish(self) -> None:
        with log_lines_of(self._plan.trace):
            self._answer(self._plan, self._report)

    def times(self) -> StepTimes | None:
        return self._stamps.read(self._plan.step)


class StepExecutor:
    """An `Executor` whose steps are answered by their `finish`, in the runner's thread.

    Args:
        gate_bound_seconds: longest wait for one word.
        detection: the detectors that are on, and whom they tell.
        sleep: sleeps so many seconds at most, or until somebody rings.
        is_closing: the service wants the step to end.
    """

    def __init__(
        self,
        attachment: Attachment,
        bank: HostViews,
        engine: Engine,
        gate_bound_seconds: float,
        sleep: Callable[[float], None],
        is_closing: Callable[[], bool],
        *,
        detection: Detection = NO_DETECTION,
    ) -> None:
        self._at = attachment
        self._bank = bank
        self._bells = attachment.control.bells
        self._stamps = attachment.control.service_stamps
        self._generations = attachment.control.generations
        self._findings = ServiceFindings(detection, attachment.geometry.layers)
        self._ordinals = {layer: i for i, layer in enumerate(attachment.geometry.layers)}
        self._engine = engine
        self._gate_bound = gate_bound_seconds
        self._sleep = sleep
        self._is_closing = is_closing
        self.last_step = 0
        self.most_in_flight = 1
        self.spin_seconds = 0.0

    @property
    def lost_stamps(self) -> int:
        return self._stamps.lost

    def prepare(self) -> None:
        pass

    def prepare_more(self) -> bool:
        return False

    def begin(self, plan: pb.StepPlan, report: pb.StepReport) -> BegunStep:
        return _HostStep(self._answer, self._stamps, plan, report)

    def give_up(self, step: int) -> None:
        self._bells.cancel(step)
        self._at.wake_worker.ring()

    def interrupt(self) -> None:
        pass  # the step that runs asks by itself

    def regions_changed(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _answer(self, plan: pb.StepPlan, report: pb.StepReport) -> None:
        """Answer every layer of `plan`; `report` says what was done, also after an error.

        Raises:
            ServiceError: the plan is refused; nothing was read.
            StepCancelled: a gate ended, or nobody wants the step any more.
        """
        check_plan(plan, self._at.geometry, self._at.epoch, self.last_step)
        caches = k_caches_of(plan, self._at.k_cache)
        self.last_step = plan.step
        self._stamps.begin(plan.step)
        slot = self._bank.staging[self._at.geometry.staging.slot_of(plan.step)]
        answers = self._bank.answers[self._at.geometry.answers.slot_of(plan.step)][: plan.rows]
        inputs: CheckedInputs | None = None
        for layer in plan.layers:
            ordinal = self._ordinals[layer]
            self._stamp(plan, ordinal, ServiceStage.GATE_BEGUN)
            if inputs is None:
                self._gate(plan, None, self._bells.published)
                pages = min(len(cache) for cache in caches.values())
                inputs = self._copy_inputs(plan, slot, pages, report)
            self._gate(plan, layer, partial(self._bells.requested, ordinal))
            self._stamp(plan, ordinal, ServiceStage.GATE_PASSED)
            self._check_layer_slot(plan, ordinal)
            self._generations.answers.begin(plan.step, ordinal)
            try:
                self._select(plan, layer, slot, caches[layer], inputs, answers)
            except StepCancelled:  # what a newer step has overwritten is told, not only that
                self._check_layer_slot(plan, ordinal)  # there is one
                raise
            self._check_layer_slot(plan, ordinal)
            self._generations.answers.end(plan.step, ordinal)
            # Before the bell: what it causes must not look earlier than it.
            self._stamp(plan, ordinal, ServiceStage.ANSWERED)
            self._bells.done(ordinal, plan.step)
            self._at.wake_worker.ring()
            report.answered_layers.append(layer)

    def _copy_inputs(
        self, plan: pb.StepPlan, slot: StagingSlot, pages: int, report: pb.StepReport
    ) -> CheckedInputs:
        """Lengths and tables, checked; pages: of the smallest K cache."""
        if self._findings.checks_generations:
            seen = self._generations.inputs.of(plan.step)
            if seen < Generation(plan.step):
                raise StepCancelled(self._findings.inputs_slot(plan, seen))
        inputs = copy_inputs(plan, slot, self._at.geometry, pages)
        # A newer step may have been staged over the copy: that is no fault of this one.
        fence()
        self._check_inputs_slot(plan)
        self._check_wanted(plan)
        report_faults(report, inputs.faults, inputs.query_start.tolist())
        self._findings.faults(report)
        return inputs

    def _check_inputs_slot(self, plan: pb.StepPlan) -> None:
        """A worker that left the step unasked may stage the next one in its place."""
        if not self._findings.checks_generations or self._bells.is_detached():
            return
        seen = self._generations.inputs.of(plan.step)
        first = self._ordinals[plan.layers[0]]
        if seen != Generation(plan.step) and self._bells.requested(first) == plan.step:
            raise StepCancelled(self._findings.inputs_slot(plan, seen))

    def _check_layer_slot(self, plan: pb.StepPlan, ordinal: int) -> None:
        """Before and behind the reading of q and weights: they are the layer's that was rung."""
        if not self._findings.checks_generations or self._bells.is_detached():
            return
        seen = self._generations.layers.of(plan.step)
        if seen != Generation(plan.step, ordinal):
            raise StepCancelled(self._findings.layer_slot(plan, ordinal, seen))

    def _gate(self, plan: pb.StepPlan, layer: int | None, word: Callable[[], int]) -> None:
        """Wait until the worker has written this step into `word`, and not beyond the bound.

        Args:
            layer: whose gate it is; None: the step's.
        """
        deadline = time.monotonic() + self._gate_bound
        while word() != plan.step:
            self._check_wanted(plan)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self._findings.gate_late(plan, layer, self._gate_bound)
                raise StepCancelled(f"gate: the worker did not come within {self._gate_bound} s")
            self._sleep(remaining)

    def _check_wanted(self, plan: pb.StepPlan) -> None:
        if self._is_closing():
            raise StepCancelled("the session is closing")
        if self._bells.is_detached():
            raise StepCancelled("the worker detached")
        newer = self._bells.published()
        if newer > plan.step:
            raise StepCancelled(f"the worker has published step {newer}")

    def _select(
        self,
        plan: pb.StepPlan,
        layer: int,
        slot: StagingSlot,
        k_cache: torch.Tensor,
        inputs: CheckedInputs,
        answers: torch.Tensor,
    ) -> None:
        done = {"logits": ServiceStage.LOGITS_DONE, "topk": ServiceStage.TOPK_DONE}
        ordinal = self._ordinals[layer]
        nan_rows = self._findings.nan_rows(plan.rows)

        def on_stage(stage: str) -> None:
            self._stamp(plan, ordinal, done[stage])
            self._bells.advance()
            self._check_wanted(plan)

        layer_inputs = LayerInputs(
            q=slot.q[: plan.rows],
            weights=slot.weights[: plan.rows],
            k_cache=k_cache,
            query_start=inputs.query_start,
            seq_lens=inputs.seq_lens,
            block_table=inputs.block_table,
            decode_requests=plan.decode_requests,
            rows_per_decode=plan.rows_per_decode,
            max_length=plan.max_length,
            skip_requests=inputs.skip_requests,
            nan_rows=nan_rows,
        )
        self._engine.select(layer_inputs, self._at.geometry.top_k, answers, on_stage)
        self._check_wanted(plan)
        self._findings.nan_scores(plan, layer, nan_rows, inputs.query_start)

    def _stamp(self, plan: pb.StepPlan, ordinal: int, stage: ServiceStage) -> None:
        self._stamps.stamp(plan.step, ordinal, stage)
