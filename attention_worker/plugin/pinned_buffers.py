"""A guard for the race of vLLM's pinned input buffers (upstream pull request 47644).

vLLM's first model runner writes each step's lengths, offsets and tables into pinned buffers that
it keeps, and copies them to the GPU without waiting. Under async scheduling an event keeps the
next step from writing before that copy is done. With pipeline parallelism steps overlap as well,
but without async scheduling no event is made: a step may read the lengths and tables of the next.

The runner still asks for the event wherever it is needed, so that making it closes the race.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from attention_worker.plugin.settings import PluginSettings
from attention_worker.vllm_compat import runner_with_pinned_inputs, wrap_once

logger = logging.getLogger(__name__)


def guard_pinned_buffers(vllm_config: Any, device: torch.device, settings: PluginSettings) -> None:
    """Let the runner of this process wait for its copies, if it has the fault and nobody minds.

    To be called where the runner exists already; doing it again does nothing.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        device: of the worker: on a CPU copies are done when they return.
    """
    if not settings.guard_pinned_buffers or device.type == "cpu":
        return
    runner = runner_with_pinned_inputs(vllm_config)
    if runner is not None:
        wrap_once(runner, "synchronize_input_prep", _with_an_event)


def _with_an_event(synchronize: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(synchronize)
    def synchronized(runner: Any) -> Any:
        # A version without the fault, and async scheduling, have made the event by themselves.
        if (
            runner.prepare_inputs_event is None
            and (steps := runner.vllm_config.max_concurrent_batches) > 1
        ):
            # One that sleeps: the engine's other threads need the CPU.
            runner.prepare_inputs_event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            logger.warning(
                "dsa-indexer: vLLM overlaps %d steps and would rewrite pinned inputs whose copies "
                "are pending (upstream pull request 47644); each step now waits for the copies of "
                "the one before (DSA_INDEXER_GUARD_PINNED_BUFFERS=0 leaves vLLM as it is)",
                steps,
            )
        return synchronize(runner)

    return synchronized
