"""Guards that the lab takes away, and engines that do what they must not.

Nothing of this can be set in a service or a session.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Event
from typing import Any
from unittest import mock

from torch import Tensor

from dsa_indexer_cli.racelab.bench import READ, SOON, Bench
from indexer_client import step as client_step
from indexer_service.step_executor import StepExecutor
from indexer_service.step_inputs import copy_inputs


class PinnedBuffer:
    """A staging buffer in host memory with a copy to the device behind it in a stream.

    On a CPU a thread stands for the stream, and an event for the kernels in front of the copy:
    the copy is pending until `arrived`. That the buffer is rewritten meanwhile is forced here, not
    left to chance; what the copy then carries is what any rewritten buffer would.
    """

    def __init__(self, bench: Bench, values: Tensor) -> None:
        self._host, self._device = values.clone(), values.new_empty(values.shape)
        self._turn = Event()
        self._copy: Future[None] = bench.copies.submit(self._run)

    def _run(self) -> None:
        self._turn.wait(SOON)
        self._device.copy_(self._host)

    def rewrite(self, values: Tensor) -> None:
        """What the engine does too early: nobody has waited for the copy."""
        self._host.copy_(values)

    def arrived(self) -> Tensor:
        """What the forward sees."""
        self._turn.set()
        self._copy.result(SOON)
        return self._device


@contextmanager
def open_gates(bench: Bench, *, of_layers: bool) -> Iterator[None]:
    """The service waits at no gate, of a step or else of its layers; and the worker's stream is
    late, so that the service has read before anything is written.
    """
    real_gate = StepExecutor._gate
    late = "stage_layer" if of_layers else "publish"
    real_write: Callable[..., None] = getattr(client_step, late)

    def gate(executor: StepExecutor, plan: Any, layer: int | None, word: Any) -> None:
        if (layer is not None) is not of_layers:
            real_gate(executor, plan, layer, word)

    def write(attachment: Any, step: int, *rest: Any) -> None:
        bench.settle(step, READ)
        real_write(attachment, step, *rest)

    with (
        mock.patch.object(StepExecutor, "_gate", gate),
        mock.patch.object(client_step, late, write),
    ):
        yield


@contextmanager
def restaged_inputs(bench: Bench) -> Iterator[None]:
    """A worker that did not wait for its answers stages its next step's lengths into the slot that
    the service is copying.
    """

    def copy(plan: Any, slot: Any, geometry: Any, pages: int) -> Any:
        copied = copy_inputs(plan, slot, geometry, pages)
        bells, first = bench.service_control().bells, geometry.layers.index(plan.layers[0])
        waited = Event()
        for _ in range(int(SOON / 0.001)):
            if bells.requested(first) == plan.step:
                break
            waited.wait(0.001)
        generations = bench.bank.control.generations.inputs
        generations.begin(plan.step + geometry.slots)
        bench.bank.staging_of(plan.step).seq_lens.add_(1)
        generations.end(plan.step + geometry.slots)
        return copied

    with mock.patch("indexer_service.step_executor.copy_inputs", copy):
        yield
