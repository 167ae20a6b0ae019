"""Findings as they are told and logged."""

import logging

import pytest

from ipc_handoff.findings import Finding, FindingKind, FindingLog, Findings
from tests.support.findings import Kept

FINDING = Finding(
    kind=FindingKind.TORN_INPUT,
    step=7,
    epoch=3,
    layer=None,
    stage="dsa.gate",
    row=4,
    request="chat-1",
    expected="130",
    seen="131",
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Broken:
    def found(self, finding: Finding) -> None:
        raise RuntimeError("planted")


@pytest.mark.parametrize("kind", FindingKind)
def test_every_kind_says_what_to_do(kind: FindingKind) -> None:
    assert kind.cause
    assert kind.workaround


def test_a_line_names_everything(caplog: pytest.LogCaptureFixture) -> None:
    FindingLog().found(FINDING)
    (record,) = caplog.records
    line = record.getMessage()
    assert "\n" not in line
    assert line.startswith(
        "torn_input: step 7, epoch 3, stage dsa.gate, row 4, request chat-1: expected 130, "
        "seen 131; likely cause: "
    )
    assert FINDING.kind.cause in line
    assert FINDING.kind.workaround in line
    assert record.levelno == logging.WARNING


def test_a_kind_is_logged_once_in_a_while_and_the_rest_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    log = FindingLog(quiet_seconds=10, clock=clock)
    for _ in range(4):
        log.found(FINDING)
    assert len(caplog.records) == 1
    clock.now += 10
    log.found(FINDING)
    assert caplog.records[1].getMessage().endswith("(3 more of this kind before)")
    log.found(FINDING)
    log.close()
    assert "1 more" in caplog.records[2].getMessage()
    log.close()
    assert len(caplog.records) == 3


def test_a_listener_that_raises_costs_the_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = Kept()
    Findings(Broken(), kept).found(FINDING)
    assert kept.findings == [FINDING]
    assert "listener failed" in caplog.text
