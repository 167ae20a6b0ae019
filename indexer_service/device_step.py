"""One step on a GPU's stream, from its launch to its report, and the times of its stages."""

from collections.abc import Callable, Mapping, Sequence

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.device_stream import Mark, told_when_lost
from indexer_service.executor import StepCancelled
from indexer_service.step_findings import ServiceFindings
from indexer_service.step_inputs import report_faults
from indexer_service.step_slots import StepSlot, StepSlots
from ipc_handoff.generations import Generation
from ipc_handoff.kernels.clock import ClockOffset, HostsClock
from ipc_handoff.kernels.words import GateEnd
from ipc_handoff.stages import SERVICE_STAGES
from ipc_handoff.stamps import StepTimes, is_sample

_WHY = {
    GateEnd.LATE: "gate: the worker did not come within {bound} s",
    GateEnd.NEWER: "the worker has published a newer step",
    GateEnd.DETACHED: "the worker detached",
    GateEnd.CLOSING: "the session is closing",
}


def is_timed(plan: pb.StepPlan) -> bool:
    """Whether the times of the step's stages are wanted: it is traced, or a sample for metrics."""
    return bool(plan.trace.trace_id) or is_sample(plan.step)


class StageTimes:
    """What the device stamped, on the host's clock.

    Args:
        look: at the device's clock; waits.
        layers: of the session.

    Attributes:
        lost: steps whose stamps were overwritten before they were read.
    """

    def __init__(self, look: Callable[[], ClockOffset], layers: int) -> None:
        self._clock = HostsClock(look)
        self._clock.look()  # which makes its kernel
        self._cells = layers * len(SERVICE_STAGES)
        self.lost = 0

    def of(self, step: int, block: Sequence[int]) -> StepTimes | None:
        """Times [layers][stages] from a step's generation and stamps; None if they are lost."""
        generation, *cells = block
        if generation != step:
            self.lost += 1
            return None
        return self._clock.of(StepTimes.of_cells(cells[: self._cells], len(SERVICE_STAGES)))


class DeviceStep:
    """A `BegunStep`.

    Args:
        offsets: first row of each request, and the number of rows.
        ordinals: of the session's layers, by their ids.
        slot: goes back to `slots` when the step is finished.
        mark: behind the step's last copy.
        stages: if times are told at all.
        gate_bound: seconds, for messages.
        device: of the mark's stream.
        findings: what the detectors say goes there.
    """

    def __init__(
        self,
        plan: pb.StepPlan,
        report: pb.StepReport,
        offsets: Sequence[int],
        ordinals: Mapping[int, int],
        slot: StepSlot,
        slots: StepSlots,
        mark: Mark,
        stages: StageTimes | None,
        gate_bound: float,
        device: torch.device,
        findings: ServiceFindings,
    ) -> None:
        self._device = device
        self._findings = findings
        self._plan, self._report = plan, report
        self._offsets, self._ordinals = offsets, ordinals
        self._slot, self._slots = slot, slots
        self._mark = mark
        self._stages = stages
        self._gate_bound = gate_bound
        self._times: StepTimes | None = StepTimes(())

    def is_finished(self) -> bool:
        with told_when_lost(self._device):
            return self._mark.query()

    def finish(self) -> None:
        plan, slot = self._plan, self._slot
        live, reason, answered, seen = slot.end
        faults, nan_rows = slot.faults(plan.requests), slot.nan_rows
        if self._stages is not None and is_timed(plan):
            self._times = self._stages.of(plan.step, slot.stamps.tolist())
        self._slots.give_back(slot)
        self._report.answered_layers.extend(plan.layers[:answered])
        if live or answered:  # otherwise a newer step's data may have been what was looked at
            report_faults(self._report, faults, self._offsets)
            self._findings.faults(self._report)
        for layer in plan.layers[:answered]:
            row = nan_rows[self._ordinals[layer]]
            if row is not None:
                self._findings.nan_row(plan, layer, row, self._offsets)
        if not live:
            if reason == GateEnd.LATE:
                self._findings.gate_late(plan, self._late_layer(answered), self._gate_bound)
            raise StepCancelled(self._why(GateEnd(reason), answered, seen))

    def _why(self, reason: GateEnd, answered: int, seen: Generation) -> str:
        """Why the step was given up; races are told."""
        if reason is GateEnd.RACED_INPUTS:
            return self._findings.inputs_slot(self._plan, seen)
        if reason is GateEnd.RACED_LAYER:
            layer = self._plan.layers[answered]
            return self._findings.layer_slot(self._plan, self._ordinals[layer], seen)
        return _WHY[reason].format(bound=self._gate_bound)

    def _late_layer(self, answered: int) -> int | None:
        """Whose gate it was; of the step's own one and its first layer's is only known that."""
        return self._plan.layers[answered] if answered else None

    def times(self) -> StepTimes | None:
        return self._times
