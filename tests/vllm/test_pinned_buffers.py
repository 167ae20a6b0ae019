"""vLLM's own runner, whose steps overlap, on a GPU that is made up: its copies are done late."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from attention_worker import vllm_compat
from attention_worker.plugin import pinned_buffers
from attention_worker.plugin.indexer_metadata import IndexerMetadataBuilder
from attention_worker.plugin.metadata import SparseMLAMetadataBuilder
from attention_worker.plugin.pinned_buffers import guard_pinned_buffers
from attention_worker.plugin.settings import PluginSettings
from tests.vllm.made_up import NAMES, config

GPU, CPU = torch.device("meta"), torch.device("cpu")
"""There is none here: tensors of the first have no data."""
STEPS = [7, 8, 9]


class LateCopies:
    """A copy engine that does nothing until somebody waits for it."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []
        self._done = 0

    def copy(self, source: torch.Tensor, targets: list[int]) -> None:
        self._pending.append(lambda: targets.append(int(source[0])))

    def finish(self, upto: int | None = None) -> None:
        upto = len(self._pending) if upto is None else upto
        while self._done < upto:
            self._pending[self._done]()
            self._done += 1

    def event(self, blocking: bool) -> SimpleNamespace:
        """As `torch.cuda.Event`: one that was never recorded is over."""
        assert blocking
        made = SimpleNamespace(upto=0)
        made.record = lambda: setattr(made, "upto", len(self._pending))
        made.synchronize = lambda: self.finish(made.upto)
        return made


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    """Also leaves vLLM's runner as it was when the test is over."""
    monkeypatch.setattr(vllm_compat, "_wrapped", set())
    monkeypatch.setattr(
        GPUModelRunner, "synchronize_input_prep", GPUModelRunner.synchronize_input_prep
    )
    late = LateCopies()
    monkeypatch.setattr(torch.cuda, "Event", late.event)
    return late


def engine(stages: int, *, second_runner: bool = False) -> SimpleNamespace:
    return SimpleNamespace(max_concurrent_batches=stages, use_v2_model_runner=second_runner)


def lengths_of_steps(copies: LateCopies, stages: int) -> list[int]:
    """What each step's kernels read, of a runner without async scheduling."""
    runner: Any = object.__new__(GPUModelRunner)
    runner.vllm_config, runner.prepare_inputs_event = engine(stages), None
    pinned, read = torch.zeros(1, dtype=torch.int32), []
    for length in STEPS:
        with runner.synchronize_input_prep():
            pinned.fill_(length)
            copies.copy(pinned, read)
    copies.finish()
    return read


def test_overlapping_steps_read_their_own_lengths(
    copies: LateCopies, caplog: pytest.LogCaptureFixture
) -> None:
    assert lengths_of_steps(copies, stages=2) == [STEPS[-1]] * len(STEPS)  # vLLM's fault
    for _ in range(2):  # every builder asks for it
        guard_pinned_buffers(engine(2), GPU, PluginSettings())
    with caplog.at_level(logging.WARNING, pinned_buffers.logger.name):
        assert lengths_of_steps(copies, stages=2) == STEPS
    (line,) = caplog.messages
    assert "47644" in line
    assert "DSA_INDEXER_GUARD_PINNED_BUFFERS=0" in line


def test_steps_that_do_not_overlap_are_left_alone(copies: LateCopies) -> None:
    guard_pinned_buffers(engine(1), GPU, PluginSettings())
    assert lengths_of_steps(copies, stages=1) == [STEPS[-1]] * len(STEPS)


def test_a_variable_leaves_vllm_as_it_is(
    copies: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSA_INDEXER_GUARD_PINNED_BUFFERS", "0")
    own = GPUModelRunner.synchronize_input_prep
    guard_pinned_buffers(engine(2), GPU, PluginSettings())
    assert GPUModelRunner.synchronize_input_prep is own


@pytest.mark.parametrize(
    ("device", "second_runner"), [(CPU, False), (GPU, True)], ids=["on a CPU", "second runner"]
)
def test_where_nothing_is_pinned_over_steps_vllm_stays_as_it_is(
    copies: LateCopies, device: torch.device, second_runner: bool
) -> None:
    own = GPUModelRunner.synchronize_input_prep
    guard_pinned_buffers(engine(2, second_runner=second_runner), device, PluginSettings())
    assert GPUModelRunner.synchronize_input_prep is own


def test_a_version_that_waits_by_itself_keeps_its_event(copies: LateCopies) -> None:
    guard_pinned_buffers(engine(2), GPU, PluginSettings())
    runner: Any = object.__new__(GPUModelRunner)
    runner.vllm_config, runner.prepare_inputs_event = engine(2), copies.event(blocking=True)
    own = runner.prepare_inputs_event
    with runner.synchronize_input_prep():
        pass
    assert runner.prepare_inputs_event is own


@pytest.mark.parametrize("builder", [IndexerMetadataBuilder, SparseMLAMetadataBuilder])
def test_each_of_the_plugins_builders_installs_it(copies: LateCopies, builder: type) -> None:
    """They are made by the runner, before its first step."""
    builder(None, NAMES, config(), GPU)
    assert lengths_of_steps(copies, stages=2) == STEPS
