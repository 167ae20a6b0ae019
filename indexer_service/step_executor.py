"""One step of one attachment: gate every layer, select, write the answer, ring.

The only place that reads the worker's staging and writes answers. A gate never waits without
a bound: it ends with its bound, with a newer step, with detachment or with closing, and what
ends it cancels the rest of the step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.engine import Engine, LayerInputs
from indexer_service.errors import precondition
from indexer_service.kernels.checked_inputs import CheckedInputs
from indexer_service.plans import check_plan
from indexer_service.step_inputs import copy_inputs, report_faults
from ipc_handoff.banks import StagingSlot, k_cache_region
from ipc_handoff.control import ServiceControl
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.stages import ServiceStage
from ipc_handoff.wakeups import Wakeup
from ipc_handoff.words import fence


class StepCancelled(Exception):
    """The rest of the step is given up; the message says why."""


@dataclass(frozen=True)
class Attachment:
    """The worker's memory and wake-ups, as the service sees them."""

    epoch: int
    geometry: HandoffGeometry
    control: ServiceControl
    staging: Sequence[StagingSlot]
    answers: Sequence[torch.Tensor]
    k_cache: Callable[[int], torch.Tensor | None]
    wake_service: Wakeup
    wake_worker: Wakeup


class StepExecutor:
    """Answers plans, one at a time.

    Args:
        gate_bound_seconds: longest wait for one word.
        sleep: sleeps so many seconds at most, or until somebody rings.
        is_closing: the service wants the step to end.
    """

    def __init__(
        self,
        attachment: Attachment,
        engine: Engine,
        gate_bound_seconds: float,
        sleep: Callable[[float], None],
        is_closing: Callable[[], bool],
    ) -> None:
        self._at = attachment
        self._bells = attachment.control.bells
        self._stamps = attachment.control.service_stamps
        self._ordinals = {layer: i for i, layer in enumerate(attachment.geometry.layers)}
        self._engine = engine
        self._gate_bound = gate_bound_seconds
        self._sleep = sleep
        self._is_closing = is_closing
        self.last_step = 0

    def answer(self, plan: pb.StepPlan, report: pb.StepReport) -> None:
        """Answer every layer of `plan`; `report` says what was done, also after an error.

        Raises:
            ServiceError: the plan is refused; nothing was read.
            StepCancelled: a gate ended, or nobody wants the step any more.
        """
        check_plan(plan, self._at.geometry, self._at.epoch, self.last_step)
        caches = self._k_caches(plan)
        self.last_step = plan.step
        self._stamps.begin(plan.step)
        slot = self._at.staging[self._at.geometry.staging.slot_of(plan.step)]
        answers = self._at.answers[self._at.geometry.answers.slot_of(plan.step)][: plan.rows]
        inputs: CheckedInputs | None = None
        for layer in plan.layers:
            ordinal = self._ordinals[layer]
            self._stamp(plan, ordinal, ServiceStage.GATE_BEGUN)
            if inputs is None:
                self._gate(plan, self._bells.published)
                pages = min(len(cache) for cache in caches.values())
                inputs = copy_inputs(plan, slot, self._at.geometry, pages)
                # A newer step may have been staged over the copy: that is no fault of this one.
                fence()
                self._check_wanted(plan)
                report_faults(report, inputs)
            self._gate(plan, partial(self._bells.requested, ordinal))
            self._stamp(plan, ordinal, ServiceStage.GATE_PASSED)
            self._select(plan, ordinal, slot, caches[layer], inputs, answers)
            # Before the bell: what it causes must not look earlier than it.
            self._stamp(plan, ordinal, ServiceStage.ANSWERED)
            self._bells.done(ordinal, plan.step)
            self._at.wake_worker.ring()
            report.answered_layers.append(layer)

    def _k_caches(self, plan: pb.StepPlan) -> dict[int, torch.Tensor]:
        caches = {}
        longest = max(plan.exact.seq_lens, default=0)
        for layer in plan.layers:
            cache = self._at.k_cache(layer)
            name = k_cache_region(layer)
            if cache is None:
                raise precondition("plan.layers", f"{name} is not registered", "register it first")
            tokens = cache.shape[0] * cache.shape[1]
            if longest > tokens:
                raise precondition(
                    "plan.exact.seq_lens",
                    f"{longest} tokens, {name} holds {tokens}",
                    "register the whole K cache",
                )
            caches[layer] = cache
        return caches

    def _gate(self, plan: pb.StepPlan, word: Callable[[], int]) -> None:
        """Wait until the worker has written this step into `word`, and not beyond the bound."""
        deadline = time.monotonic() + self._gate_bound
        while word() != plan.step:
            self._check_wanted(plan)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
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
        ordinal: int,
        slot: StagingSlot,
        k_cache: torch.Tensor,
        inputs: CheckedInputs,
        answers: torch.Tensor,
    ) -> None:
        done = {"logits": ServiceStage.LOGITS_DONE, "topk": ServiceStage.TOPK_DONE}

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
        )
        self._engine.select(layer_inputs, self._at.geometry.top_k, answers, on_stage)
        self._check_wanted(plan)

    def _stamp(self, plan: pb.StepPlan, ordinal: int, stage: ServiceStage) -> None:
        self._stamps.stamp(plan.step, ordinal, stage)
