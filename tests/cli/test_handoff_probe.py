"""The measured hand-over's two sides: what they say to each other, and of what went wrong."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")
from dsa_indexer_cli import handoff_probe
from dsa_indexer_cli.children import PEER_GONE
from dsa_indexer_cli.handoff_probe import Peer, PeerGone
from ipc_handoff.cuda_regions import CudaExport
from tests.support.fake_cuda import Machine, Process, running_as


@pytest.fixture
def ends() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def _main(side: str, end: socket.socket, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    status = handoff_probe.main(side, str(end.detach()), "0", "1")
    (line,) = capsys.readouterr().out.splitlines()
    return status, json.loads(line)


def test_the_sides_say_an_object_a_line(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = (Peer(end.detach()) for end in ends)
    ours.say(step=1)
    ours.say(step=2, more="\n")
    assert theirs.hear() == {"step": 1}
    assert theirs.hear() == {"step": 2, "more": "\n"}


def test_the_other_side_s_end_is_noticed(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    peer = Peer(ours.detach())
    theirs.close()
    with pytest.raises(PeerGone):
        peer.hear()
    with pytest.raises(PeerGone):
        for _ in range(2):
            peer.say(step=1)


def test_a_result_is_printed(
    ends: tuple[socket.socket, socket.socket],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        handoff_probe, "work", lambda peer, worker, service, flags: {"of": [1, service]}
    )
    assert _main("worker", ends[0], capsys) == (0, {"of": [1, 1]})


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            RuntimeError("CUDA error: out of it\nadvice of many lines"),
            "worker: CUDA error: out of it",
        ),
        (ZeroDivisionError(), "worker: ZeroDivisionError"),
        (PeerGone(), PEER_GONE),
    ],
)
def test_whatever_goes_wrong_is_one_line(
    ends: tuple[socket.socket, socket.socket],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    says: str,
) -> None:
    def work(*arguments: object) -> Any:
        raise error

    monkeypatch.setattr(handoff_probe, "work", work)
    assert _main("worker", ends[0], capsys) == (1, {"error": says})


def test_a_layer_s_time_is_the_median_beyond_the_work_alone() -> None:
    found = handoff_probe._result([160.0, 176.0, 1776.0], [16.0, 32.0, 0.0])
    assert found["microseconds_a_layer"] == 10.0
    assert found["worst_microseconds_a_layer"] == 110.0
    assert (found["layers"], found["steps"]) == (16, 3)


def test_an_export_arrives_as_it_was_sent() -> None:
    with running_as(Process(Machine(), 1)):
        bank = handoff_probe.DeviceBank(handoff_probe.GEOMETRY, 0, 1, 0)
        offer = json.loads(json.dumps(handoff_probe._offer(bank, "staging")))
        assert handoff_probe._export(offer) == bank.memories["staging"].export  # type: ignore[attr-defined]
        assert isinstance(handoff_probe._export(offer), CudaExport)


def _interpreted(addend: int) -> tuple[int, Any]:
    """The worker's status and what it printed."""
    steps = handoff_probe._UNTIMED + 1
    result = subprocess.run(
        [sys.executable, "-m", "tests.cli.interpreted_probe", str(steps), str(addend)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


def test_both_sides_take_every_step_in_triton_s_interpreter() -> None:
    status, found = _interpreted(addend=1)
    assert status == 0, found
    assert found["steps"] == 1


def test_wrong_answers_are_noticed_in_triton_s_interpreter() -> None:
    status, found = _interpreted(addend=2)
    assert status == 1
    assert found == {"error": "worker: step 1: other answers came than the service gave"}
