"""What the worker's detectors say about one session's steps."""

from collections.abc import Sequence
from functools import partial

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.inputs import StepInputs
from indexer_client.positions import WrongRow, wrong_rows
from indexer_client.selection_stamps import Selection
from ipc_handoff.detectors import Detection, Detector
from ipc_handoff.findings import FindingKind
from ipc_handoff.generations import Generation, named
from ipc_handoff.side_findings import SideFindings

_STAGE, _WAIT, _HAND_BACK, _ATTEND = "dsa.stage", "dsa.wait", "dsa.handback", "dsa.attend"

# Reports come later than their step ends; then its requests must still be known.
_REMEMBERED_STEPS = 256


class WorkerFindings(SideFindings):
    """Attributes:
    checks_shared_indices: selections that layers share are asked whose they are.
    """

    def __init__(self, detection: Detection, layers: Sequence[int]) -> None:
        super().__init__(detection, layers)
        self.checks_shared_indices = detection.has(Detector.SHARED_INDICES)
        self._request_ids: dict[int, Sequence[str]] = {}

    def begin(self, step: int, inputs: StepInputs) -> None:
        """Remember what the engine calls the step's requests."""
        if inputs.request_ids is None:
            return
        if len(self._request_ids) >= _REMEMBERED_STEPS:
            del self._request_ids[next(iter(self._request_ids))]
        self._request_ids[step] = inputs.request_ids

    def inputs(self, step: int, epoch: int, inputs: StepInputs, page_size: int) -> None:
        """Positions and slots that contradict lengths and table. Inputs in host memory."""
        if inputs.positions is None or not self.has(Detector.POSITIONS):
            return
        found = wrong_rows(inputs, page_size)
        self._wrong(FindingKind.BAD_POSITION, step, epoch, found.positions)
        self._wrong(FindingKind.BAD_SLOT, step, epoch, found.slots)

    def _wrong(self, kind: FindingKind, step: int, epoch: int, rows: Sequence[WrongRow]) -> None:
        for row, request, expected, seen in rows:
            where = (row, self.request(step, request))
            self.tell(kind, step, epoch, None, _STAGE, str(expected), str(seen), *where)

    def report(self, report: pb.StepReport) -> None:
        """Requests that the service did not trust."""
        self._faults(report, partial(self.request, report.step))

    def wait_ended(self, step: int, epoch: int, layer: int | None, how: str) -> None:
        """A wait ended without an answer. layer: id; None: it is not known."""
        if self.has(Detector.WAITS):
            self.tell(FindingKind.WAIT_ENDED, step, epoch, layer, _WAIT, "an answer", how)

    def stale_answer(self, step: int, epoch: int, ordinal: int, seen: Generation) -> None:
        """The answer that was rung is not this layer's, as its slot says."""
        self._slot(FindingKind.STALE_ANSWER, step, epoch, ordinal, seen)

    def overwritten_answer(self, step: int, epoch: int, ordinal: int, seen: Generation) -> None:
        """Another answer came over this one while it was copied."""
        self._slot(FindingKind.OVERWRITTEN_BEFORE_READ, step, epoch, ordinal, seen)

    def _slot(
        self, kind: FindingKind, step: int, epoch: int, ordinal: int, seen: Generation
    ) -> None:
        layer = self.layers[ordinal]
        expected = named(Generation(step, ordinal), self.layers)
        self.tell(kind, step, epoch, layer, _HAND_BACK, expected, named(seen, self.layers))

    def shared_index_leak(self, step: int, epoch: int, layer: int, seen: Selection | None) -> None:
        """A layer would attend to what no layer of its step has selected. layer: id."""
        found = f"step {seen.step}, layer {seen.layer}" if seen else "nothing that was handed back"
        kind = FindingKind.SHARED_INDEX_LEAK
        self.tell(kind, step, epoch, layer, _ATTEND, f"step {step}", found)

    def request(self, step: int, request: int) -> str:
        """What the engine calls a step's request, or its place in the batch."""
        ids = self._request_ids.get(step, ())
        return ids[request] if request < len(ids) else f"#{request}"
