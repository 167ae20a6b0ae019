"""What the plugin asks of a session on a GPU. The session itself is a stand-in."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_worker.placements import Placement
from attention_worker.plugin import device_model_steps
from attention_worker.plugin.device_model_steps import DeviceModelSteps, reserved_bytes
from attention_worker.plugin.layers import Model
from attention_worker.plugin.model_steps import Engine
from attention_worker.plugin.settings import PluginSettings
from indexer_client import ClientSettings
from ipc_handoff.layout import HandoffGeometry
from tests.attention_worker.test_plugin_steps import inputs

GEOMETRY = HandoffGeometry(
    layers=(0, 1),
    heads=64,
    head_dim=128,
    top_k=2048,
    page_size=64,
    max_rows=8192,
    max_requests=32,
    max_context=1 << 16,
    slots=2,
)
ENGINE = Engine(
    device=torch.device("cuda", 0),
    rows_per_decode=3,
    settings=ClientSettings(address="unix:/run/x"),
    plugin=PluginSettings(on_refusal="error", attach_seconds=7.0),
    name="tiny",
)


class Session:
    """Notes what is asked of it, in order."""

    placement = Placement.MPS
    placement_reason = "made up"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.made_with = named
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any, **named: Any) -> None:
            self.asked.append((name, *arguments))

        return note


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> DeviceModelSteps:
    monkeypatch.setattr(device_model_steps, "DeviceIndexer", Session)
    return DeviceModelSteps(GEOMETRY, {}, ENGINE, Model.TARGET)


def test_kernels_are_made_before_a_service_is_looked_for(steps: DeviceModelSteps) -> None:
    assert steps.indexer.asked == [("warm_up", [1, 3]), ("start",), ("wait_attached", 7.0)]
    assert steps.indexer.made_with["model"] == "target"


def test_forwards_are_handed_on(steps: DeviceModelSteps) -> None:
    step = inputs(90)
    steps.indexer.asked.clear()
    k, slots, q, weights, out = (torch.zeros(1) for _ in range(5))
    steps.begin(step)
    steps.insert(1, k, slots)
    steps.select(1, q, weights, out)
    steps.begin_capture(6, 3)
    steps.begin(None)
    steps.close()
    assert steps.indexer.asked == [
        ("begin_step", step),
        ("insert", k, slots, 1),
        ("select", 1, q, weights, out),
        ("begin_inline", 6, 3),
        ("begin_inline", 1),
        ("close",),
    ]


def test_memory_is_reserved_for_what_comes_later() -> None:
    banks = ENGINE.settings.banks * (GEOMETRY.device.staging_size + GEOMETRY.device.answers_size)
    service = ENGINE.plugin.service_memory_mib << 20
    temporaries = 1 << 28
    assert reserved_bytes(GEOMETRY, ENGINE) == temporaries + banks + service
    elsewhere = PluginSettings(service_device=1)
    assert reserved_bytes(GEOMETRY, replace(ENGINE, plugin=elsewhere)) == temporaries + banks
    inline = replace(ENGINE, settings=ClientSettings(placement="inline"))
    assert reserved_bytes(GEOMETRY, inline) == temporaries
