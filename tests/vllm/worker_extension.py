"""What tests do inside vLLM's worker process: vLLM mixes this class into its own."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

GATE_SECONDS = 60.0


class WorkerExtension:
    """Methods are called by name, through `LLM.collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    _batches: list[dict[str, Any]]
    _digest: Any

    def hold(self, gate: str) -> None:
        """Let the next forward wait until the file `gate` is there."""
        execute = self.model_runner.execute_model

        def execute_later(*arguments: Any, **named: Any) -> Any:
            self.model_runner.execute_model = execute
            deadline = time.monotonic() + GATE_SECONDS
            while not Path(gate).exists():
                assert time.monotonic() < deadline, gate
                time.sleep(0.01)
            return execute(*arguments, **named)

        self.model_runner.execute_model = execute_later

    def warm_up(self) -> None:
        """A first forward without requests, which vLLM leaves out on a CPU without compilation."""
        self.model_runner.profile_run()

    def facts(self) -> dict[str, Any]:
        """How this process was set up by the plugin."""
        from vllm.model_executor.custom_op import op_registry_oot

        from attention_worker.plugin.sessions import open_steps

        attention = [layer for layer in self._layers().values() if hasattr(layer, "attn_backend")]
        return {
            "backends": sorted({layer.attn_backend.get_name() for layer in attention}),
            "indexer": op_registry_oot["SparseAttnIndexer"].__name__,
            "cache_dtypes": sorted({str(layer.kv_cache.dtype) for layer in attention}),
            "layers": len(attention),
            "overlapping_steps": self.vllm_config.max_concurrent_batches,
            "steps": len(open_steps()),
            "waits_for_copies": self.model_runner.prepare_inputs_event is not None,
        }

    def statistics(self) -> dict[str, int]:
        """Of the session with the service; {} without one."""
        steps = self._steps()
        session = getattr(steps, "session", None)
        return asdict(session.statistics) if session is not None else {}

    def watch_batches(self) -> None:
        """From now on note the batches that steps are begun with."""
        steps = self._steps()
        begin, self._batches = steps.begin, []

        def watched(inputs: Any) -> None:
            starts = inputs.exact_query_start
            self._batches.append(
                {
                    "rows": [after - before for before, after in pairwise(starts)],
                    "lengths": list(inputs.exact_seq_lens),
                    "decodes": inputs.decode_requests,
                }
            )
            begin(inputs)

        steps.begin = watched

    def batches(self) -> list[dict[str, Any]]:
        """What `watch_batches` has noted: of each batch its requests' rows and lengths, and how
        many of them are scored together."""
        return self._batches

    def watch_selections(self) -> None:
        """From now on note what is selected."""
        steps = self._steps()
        select, digest = steps.select, sha256()

        def watched(layer: int, q: Any, weights: Any, out: torch.Tensor) -> None:
            select(layer, q, weights, out)
            digest.update(bytes([layer]) + out.contiguous().numpy().tobytes())

        steps.select, self._digest = watched, digest

    def selections(self) -> str:
        """A digest of what `watch_selections` has noted, layer by layer."""
        digest: str = self._digest.hexdigest()
        return digest

    def plant(self, fault: str) -> None:
        """From now on every selection is wrong.

        Args:
            fault: "shift", positions are one too low; "half", the second half is left out.
        """
        steps = self._steps()
        select = steps.select

        def wrong(layer: int, q: Any, weights: Any, out: torch.Tensor) -> None:
            select(layer, q, weights, out)
            if fault == "shift":
                out[out > 0] -= 1
            else:
                counts = (out >= 0).sum(1, keepdim=True)
                out.masked_fill_(torch.arange(out.shape[1]) >= (counts + 1) // 2, -1)

        steps.select = wrong

    def kill_after(self, pid: int, selections: int) -> None:
        """Kill a process when so many more layers have been selected."""
        steps = self._steps()
        select: Callable[..., None] = steps.select
        left = selections

        def counted(*arguments: Any) -> None:
            nonlocal left
            select(*arguments)
            left -= 1
            if not left:
                os.kill(pid, signal.SIGKILL)
                steps.select = select

        steps.select = counted

    def _layers(self) -> dict[str, Any]:
        context: dict[str, Any] = self.model_runner.compilation_config.static_forward_context
        return context

    def _steps(self) -> Any:
        """Of the target model."""
        from attention_worker.plugin.layers import Model
        from attention_worker.plugin.sessions import _open

        (found,) = [each.steps for (model, _), each in _open.items() if model is Model.TARGET]
        return found
