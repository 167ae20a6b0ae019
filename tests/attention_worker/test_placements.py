"""Which placement a worker gets, and why not the wanted one."""

import pytest
import torch

from attention_worker import placements
from attention_worker.placements import Placement, choose

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with MPS and two GPUs that reach each other."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    monkeypatch.setattr(placements.cuda_runtime, "runs_under_mps", lambda device: True)
    monkeypatch.setattr(placements.cuda_runtime, "can_access_peer", lambda own, peer: True)


@pytest.fixture
def without_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements.cuda_runtime, "runs_under_mps", lambda device: False)


def test_auto_takes_mps_where_it_runs() -> None:
    chosen = choose(Placement.AUTO, GPU)
    assert (chosen.placement, chosen.service_device) == (Placement.MPS, 0)
    assert not chosen.is_refusal


def test_auto_takes_the_gpu_that_the_service_has_for_itself() -> None:
    chosen = choose(Placement.AUTO, GPU, 1)
    assert (chosen.placement, chosen.service_device) == (Placement.PEER_GPU, 1)
    assert choose(Placement.AUTO, GPU, 0).placement is Placement.MPS


@pytest.mark.parametrize("wanted", [Placement.AUTO, Placement.TIMESLICE])
def test_without_mps_nothing_polls(without_mps: None, wanted: Placement) -> None:
    chosen = choose(wanted, GPU)
    assert (chosen.placement, chosen.service_device) == (Placement.TIMESLICE, 0)
    assert not chosen.is_refusal
    assert "without MPS" in chosen.reason


def test_timeslice_is_had_under_mps_as_well() -> None:
    assert choose(Placement.TIMESLICE, GPU).placement is Placement.TIMESLICE


def test_a_worker_on_the_cpu_has_its_own_session() -> None:
    assert choose(Placement.AUTO, torch.device("cpu")).placement is Placement.CPU


def test_inline_is_no_refusal_when_asked_for() -> None:
    chosen = choose(Placement.INLINE, GPU)
    assert chosen.placement is Placement.INLINE
    assert not chosen.is_refusal


def test_a_blocking_launch_is_refused_with_the_variable_and_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    chosen = choose(Placement.AUTO, GPU)
    assert chosen.placement is Placement.INLINE
    assert chosen.is_refusal
    assert chosen.reason.startswith("CUDA_LAUNCH_BLOCKING: ")
    assert "(fix: unset it)" in chosen.reason
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert choose(Placement.AUTO, GPU).placement is Placement.MPS


def test_mps_without_a_daemon_is_refused(without_mps: None) -> None:
    chosen = choose(Placement.MPS, GPU)
    assert chosen.is_refusal
    assert chosen.reason.startswith("placement: mps, but no MPS daemon serves GPU 0 (fix: ")


@pytest.mark.parametrize("peer", [None, 0])
def test_a_peer_must_be_another_gpu(peer: int | None) -> None:
    chosen = choose(Placement.PEER_GPU, GPU, peer)
    assert chosen.is_refusal
    assert chosen.reason.startswith(f"service_device: {peer}, the worker is on 0 (fix: ")


def test_a_peer_must_be_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements.cuda_runtime, "can_access_peer", lambda own, peer: False)
    chosen = choose(Placement.PEER_GPU, GPU, 1)
    assert chosen.is_refusal
    assert "cannot write to GPU 1 (fix: " in chosen.reason


def test_cpu_is_refused_on_a_gpu() -> None:
    assert choose(Placement.CPU, GPU).is_refusal
