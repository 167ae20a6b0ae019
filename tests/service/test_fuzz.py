"""A short run of each surface, and that each finds what was planted."""

import os
from pathlib import Path

import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.reports import ReportReader
from indexer_service import step_executor
from ipc_handoff.descriptors import Inbox
from tests.service import fuzz_packets
from tests.service.fuzz import fuzz

SEED = 20_26
INPUTS = {"rpc": 100, "words": 400, "packets": 400, "reports": 2000}


def _fuzz(surface: str, folder: Path) -> str:
    return str(fuzz(surface, INPUTS[surface], SEED, folder, lambda _: None))


@pytest.mark.parametrize("surface", INPUTS)
def test_random_inputs_do_no_harm(surface: str, tmp_path: Path) -> None:
    found = _fuzz(surface, tmp_path)
    wanted = {
        "rpc": ("ok", "invalid_argument", "failed_precondition"),
        "words": ("answered", "rejected", "cancelled", "rows not trusted"),
        "packets": ("taken", "refused", "sessions ended"),
        "reports": ("reports read", "findings", "detachments"),
    }
    # They get as far as the code that they are for.
    assert all(f" {name}" in found for name in wanted[surface]), found


def test_a_plan_that_is_not_checked_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_executor, "check_plan", lambda *_: None)
    with pytest.raises(AssertionError, match=f"words: input .* of seed {SEED}"):
        _fuzz("words", tmp_path)


def test_a_descriptor_that_stays_open_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []

    def put_and_keep(self: Inbox, token: int, descriptor: int) -> str:
        kept.append(os.dup(descriptor))
        return put(self, token, descriptor)

    put = Inbox.put
    monkeypatch.setattr(Inbox, "put", put_and_keep)
    monkeypatch.setattr(fuzz_packets, "_SOON", 0.2)
    with pytest.raises(AssertionError, match="descriptors stay open"):
        _fuzz("packets", tmp_path)
    for descriptor in kept:
        os.close(descriptor)


def test_a_reader_that_trusts_a_report_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: ReportReader, report: pb.StepReport) -> None:
        pb.StepStatus.Name(report.status)

    monkeypatch.setattr(ReportReader, "read", read)
    with pytest.raises(AssertionError, match="reports: input"):
        _fuzz("reports", tmp_path)
