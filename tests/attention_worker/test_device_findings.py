"""Entries that a worker's kernels wrote, as findings; nothing is launched."""

import logging

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from attention_worker import device_findings
from attention_worker.device_findings import DeviceFindings
from indexer_client.step_findings import WorkerFindings
from ipc_handoff.detectors import Detection, Detector
from ipc_handoff.findings import Finding, FindingKind
from ipc_handoff.generations import Generation
from ipc_handoff.kernels.found import ENTRIES, Contradiction, Entry, Found

LAYERS = (4, 8)
STEP, EPOCH = 9, 3


class Worker:
    """Its kernels' ring, and what has been told of it."""

    def __init__(self) -> None:
        self.told: list[Finding] = []
        self._ring, self._written = Found(torch.device("cpu")), 0
        detection = Detection(self, frozenset(Detector))
        self._findings = DeviceFindings(WorkerFindings(detection, LAYERS), self._ring)

    def found(self, finding: Finding) -> None:
        self.told.append(finding)

    def write(self, *entries: Entry) -> None:
        """As kernels do."""
        for entry in entries:
            words = torch.tensor([self._written + 1, *entry])
            self._ring.entries[self._written % ENTRIES] = words
            self._written += 1

    def look(self) -> None:
        self._findings.tell(EPOCH)


def entry(kind: Contradiction, *, ordinal: int = -1, row: int = -1, request: int = -1) -> Entry:
    return Entry(kind, STEP, ordinal, row, request, Generation(STEP, 1).word, Generation(2).word)


KINDS = {
    Contradiction.TORN_INPUT: FindingKind.TORN_INPUT,
    Contradiction.NEGATIVE_LENGTH: FindingKind.BAD_LENGTH,
    Contradiction.LENGTH_OUT_OF_BOUNDS: FindingKind.BAD_LENGTH,
    Contradiction.PAGE_OUT_OF_BOUNDS: FindingKind.BAD_PAGE,
    Contradiction.QUERY_OFFSETS: FindingKind.BAD_QUERY_OFFSETS,
    Contradiction.POSITION: FindingKind.BAD_POSITION,
    Contradiction.SLOT: FindingKind.BAD_SLOT,
    Contradiction.STALE_ANSWER: FindingKind.STALE_ANSWER,
    Contradiction.OVERWRITTEN_ANSWER: FindingKind.OVERWRITTEN_BEFORE_READ,
    Contradiction.SHARED_INDEX_LEAK: FindingKind.SHARED_INDEX_LEAK,
}


@pytest.mark.parametrize("what", Contradiction)
def test_every_contradiction_is_a_finding(what: Contradiction) -> None:
    worker = Worker()
    worker.write(entry(what, ordinal=1, row=5, request=2))
    worker.look()
    (told,) = worker.told
    assert (told.kind, told.step, told.epoch, told.layer) == (KINDS[what], STEP, EPOCH, LAYERS[1])
    assert (told.row, told.request) == (5, "#2")
    assert told.expected and told.seen and told.expected != told.seen


def test_generations_are_named_and_what_is_no_place_is_left_out() -> None:
    worker = Worker()
    worker.write(entry(Contradiction.STALE_ANSWER))
    worker.look()
    (told,) = worker.told
    assert told.expected == f"step {STEP}, layer {LAYERS[1]}"
    assert told.seen == f"step 2, layer {LAYERS[0]}"
    assert (told.layer, told.row, told.request) == (None, None, None)


def test_an_answer_that_many_programs_saw_overwritten_is_told_once_a_layer() -> None:
    worker = Worker()
    for ordinal in range(len(LAYERS)):
        rows = [entry(Contradiction.OVERWRITTEN_ANSWER, ordinal=ordinal, row=r) for r in range(6)]
        worker.write(*rows[:3])
        worker.look()
        worker.write(*rows[3:])
        worker.look()
    assert [told.layer for told in worker.told] == list(LAYERS)


def test_requests_that_are_all_wrong_are_all_told() -> None:
    worker = Worker()
    worker.write(*(entry(Contradiction.TORN_INPUT, row=r, request=r) for r in range(4)))
    worker.look()
    assert [told.row for told in worker.told] == [0, 1, 2, 3]


def test_findings_that_were_overwritten_are_counted_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker()
    worker.write(*(entry(Contradiction.SLOT, request=r) for r in range(ENTRIES + 7)))
    with caplog.at_level(logging.WARNING, device_findings.logger.name):
        for _ in range(2):  # they are counted once
            worker.look()
    assert len(worker.told) == ENTRIES
    assert caplog.messages == ["7 more findings were overwritten before they were looked at"]
