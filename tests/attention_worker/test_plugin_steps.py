"""The steps of a model on a CPU, without vLLM: forwards as vLLM would make them."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_worker.plugin import sessions
from attention_worker.plugin.layers import Model
from attention_worker.plugin.model_steps import Engine, HostSteps, ModelSteps, RemoteHostSteps
from attention_worker.plugin.settings import PluginSettings
from indexer_client import ClientSettings, ServiceUnavailable, StepInputs
from ipc_handoff.layout import HandoffGeometry
from tests.support.processes import ServiceProcess
from tests.support.waiting import SOON, eventually

LAYERS, HEADS, K, PAGE, PAGES = (1, 4), 16, 16, 64, 6
GEOMETRY = HandoffGeometry(
    layers=LAYERS,
    heads=HEADS,
    head_dim=128,
    top_k=K,
    page_size=PAGE,
    max_rows=16,
    max_requests=4,
    max_context=128,
    slots=2,
)


def engine(**settings: object) -> Engine:
    return Engine(
        device=torch.device("cpu"),
        rows_per_decode=1,
        settings=ClientSettings(wait_bound_seconds=SOON, **settings),
        plugin=PluginSettings(on_refusal="error", attach_seconds=SOON),
        name="tiny",
    )


def caches() -> dict[int, torch.Tensor]:
    return {layer: torch.zeros(PAGES, PAGE, 132, dtype=torch.uint8) for layer in LAYERS}


def inputs(length: int) -> StepInputs:
    return StepInputs(
        query_start=torch.tensor([0, 1, 4], dtype=torch.int32),
        seq_lens=torch.tensor([length, 40], dtype=torch.int32),
        block_table=torch.tensor([[5, 1], [3, 0]], dtype=torch.int32),
        rows=4,
        decode_requests=1,
        rows_per_decode=1,
        max_length=length,
        exact_seq_lens=(length, 40),
        exact_query_start=(0, 1, 4),
    )


def forward(steps: ModelSteps, number: int, layers: tuple[int, ...] = LAYERS) -> list[torch.Tensor]:
    """A forward of six rows, of which the last two are padding."""
    generator = torch.Generator().manual_seed(number)
    found = []
    steps.begin(inputs(90 + number))
    for layer in layers:
        keys = torch.randn(PAGES * PAGE, 128, generator=generator).to(torch.bfloat16)
        steps.insert(layer, keys, torch.randperm(len(keys), generator=generator))
        q = torch.randn(6, HEADS, 128, generator=generator).to(torch.float8_e4m3fn)
        weights = torch.randn(6, HEADS, generator=generator)
        out = torch.full((6, K), 7, dtype=torch.int32)
        steps.select(layer, q, weights, out)
        assert bool((out[4:] == -1).all())
        found.append(out)
    return found


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    process = ServiceProcess(tmp_path / "d" / "i.sock", gate_bound_seconds=SOON)
    yield process
    process.kill()


def test_a_service_gives_what_this_process_computes(service: ServiceProcess) -> None:
    inline = HostSteps(GEOMETRY, caches())
    remote = RemoteHostSteps(GEOMETRY, caches(), engine(address=service.address))
    for number in range(5):
        for mine, other in zip(forward(inline, number), forward(remote, number), strict=True):
            assert torch.equal(mine, other)
    counts = remote.session.statistics
    assert (counts.steps, counts.answered_layers, counts.inline_layers) == (5, 10, 0)
    remote.close()


def test_a_forward_that_ends_early_does_not_disturb_the_next(service: ServiceProcess) -> None:
    inline = HostSteps(GEOMETRY, caches())
    remote = RemoteHostSteps(GEOMETRY, caches(), engine(address=service.address))
    for steps in (inline, remote):
        forward(steps, 0)
        forward(steps, 1, LAYERS[:1])
    for mine, other in zip(forward(inline, 2), forward(remote, 2), strict=True):
        assert torch.equal(mine, other)
    assert remote.session.statistics.inline_layers == 0
    remote.close()


def test_a_batch_without_rows_selects_nothing() -> None:
    steps = HostSteps(GEOMETRY, caches())
    steps.begin(None)
    out = torch.zeros(2, K, dtype=torch.int32)
    q = torch.zeros(2, HEADS, 128, dtype=torch.float8_e4m3fn)
    steps.select(LAYERS[0], q, torch.zeros(2, HEADS), out)
    assert bool((out == -1).all())


def test_without_a_service_the_engine_ends_if_that_was_asked_for(tmp_path: Path) -> None:
    asked = engine(address=f"unix:{tmp_path / 'nobody'}")
    soon = replace(asked, plugin=asked.plugin.model_copy(update={"attach_seconds": 0.2}))
    before = set(threading.enumerate())
    with pytest.raises(ServiceUnavailable, match="nobody"):
        RemoteHostSteps(GEOMETRY, caches(), soon)
    assert eventually(lambda: set(threading.enumerate()) <= before)


def test_without_a_service_the_engine_works_inline_otherwise(tmp_path: Path) -> None:
    asked = engine(address=f"unix:{tmp_path / 'nobody'}")
    inline = replace(asked, plugin=PluginSettings(on_refusal="inline"))
    steps = RemoteHostSteps(GEOMETRY, caches(), inline)
    for mine, other in zip(
        forward(HostSteps(GEOMETRY, caches()), 0), forward(steps, 0), strict=True
    ):
        assert torch.equal(mine, other)
    steps.close()


def test_steps_are_kept_until_caches_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_open", {})
    first, second, asked = caches(), caches(), engine(placement="inline")
    closed = []
    steps = sessions.steps_of(Model.TARGET, GEOMETRY, first, asked)
    monkeypatch.setattr(steps, "close", lambda: closed.append(steps))
    assert sessions.steps_of(Model.TARGET, GEOMETRY, first, asked) is steps
    assert sessions.steps_of(Model.DRAFT, GEOMETRY, first, asked) is not steps
    assert not closed
    assert sessions.steps_of(Model.TARGET, GEOMETRY, second, asked) is not steps
    assert closed == [steps]
    assert len(sessions.open_steps()) == 2
