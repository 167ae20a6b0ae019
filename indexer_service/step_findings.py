"""What the service's detectors say about one session's steps."""

from bisect import bisect_right
from collections.abc import Sequence

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.detectors import Detection, Detector
from ipc_handoff.findings import FindingKind
from ipc_handoff.generations import Generation, named
from ipc_handoff.side_findings import SideFindings

_GATE, _LOGITS = "dsa.gate", "dsa.logits"


class ServiceFindings(SideFindings):
    """See `SideFindings`. Requests are named by their place: their ids stay in the worker."""

    def __init__(self, detection: Detection, layers: Sequence[int]) -> None:
        super().__init__(detection, layers)
        self.counts_nan = detection.has(Detector.NAN_SCORES)

    def faults(self, report: pb.StepReport) -> None:
        """Requests that the guard of inputs did not trust, as they are reported."""
        self._faults(report, "#{}".format)

    def gate_late(self, plan: pb.StepPlan, layer: int | None, seconds: float) -> None:
        """A gate ended by its bound. layer: id, where it is known."""
        if self.has(Detector.WAITS):
            expected = f"the worker within {seconds:g} s"
            self.tell(
                FindingKind.WAIT_ENDED, plan.step, plan.epoch, layer, _GATE, expected, "nobody"
            )

    def inputs_slot(self, plan: pb.StepPlan, seen: Generation) -> str:
        """Lengths and tables are another step's, as their slot says: what that means."""
        kind = _slot_kind(seen, Generation(plan.step))
        found = f"step {seen.step}{'' if seen.is_written else ', being written'}"
        self.tell(kind, plan.step, plan.epoch, None, _GATE, f"step {plan.step}", found)
        return f"{kind}: the slot of its lengths and tables holds {found}"

    def layer_slot(self, plan: pb.StepPlan, ordinal: int, seen: Generation) -> str:
        """q and weights are another layer's, as their slot says: what that means."""
        wanted = Generation(plan.step, ordinal)
        kind, stage = _slot_kind(seen, wanted), _GATE if seen < wanted else _LOGITS
        expected, found = named(wanted, self.layers), named(seen, self.layers)
        self.tell(kind, plan.step, plan.epoch, self.layers[ordinal], stage, expected, found)
        return f"{kind}: the slot of its q and weights holds {found}"

    def nan_rows(self, rows: int) -> torch.Tensor | None:
        """bool [rows] for the engine to mark; None if nobody asks."""
        return torch.zeros(rows, dtype=torch.bool) if self.counts_nan else None

    def nan_scores(
        self, plan: pb.StepPlan, layer: int, nan_rows: torch.Tensor | None, offsets: torch.Tensor
    ) -> None:
        """After a layer's selection. layer: id; offsets: int32 [R+1], first row of each request."""
        if nan_rows is None or not nan_rows.any():
            return
        rows = nan_rows.nonzero().flatten().tolist()
        self._nan(plan, layer, rows[0], offsets.tolist(), f"NaN in {len(rows)} rows")

    def nan_row(self, plan: pb.StepPlan, layer: int, row: int, offsets: Sequence[int]) -> None:
        """The first row that held NaN, where others are not counted. As `nan_scores`."""
        self._nan(plan, layer, row, offsets, "NaN")

    def _nan(
        self, plan: pb.StepPlan, layer: int, row: int, offsets: Sequence[int], seen: str
    ) -> None:
        request = f"#{bisect_right(offsets, row) - 1}"
        kind = FindingKind.NAN_SCORES
        self.tell(kind, plan.step, plan.epoch, layer, _LOGITS, "numbers", seen, row, request)


def _slot_kind(seen: Generation, wanted: Generation) -> FindingKind:
    kinds = FindingKind
    return kinds.READ_BEFORE_WRITTEN if seen < wanted else kinds.OVERWRITTEN_BEFORE_READ
