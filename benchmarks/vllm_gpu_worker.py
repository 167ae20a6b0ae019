"""What the vLLM comparison does inside vLLM's workers: vLLM mixes this class into its own.

Importing it, which a worker does before it loads a model, gives dummy models weights that matter.
"""

import sys
from dataclasses import asdict
from typing import Any

import torch
import vllm.model_executor.model_loader.dummy_loader as dummy_loader
from vllm_gpu_model import SAMPLED_ROWS, unit_gain

dummy_loader.initialize_dummy_weights = unit_gain


class WorkerExtension:
    """Methods are called by name, through `LLM.collective_rpc`."""

    model_runner: Any
    _hooks: list[Any]
    _sampled: dict[str, list[torch.Tensor]]
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]]
    _replay: Any

    def statistics(self) -> list[dict[str, Any]]:
        """Of the plugin's sessions; [] without one."""
        found = []
        for session in self._sessions():
            if session is not None:
                counts = asdict(session.statistics)
                placement = str(getattr(session, "placement", "cpu"))
                error = None if session.last_error is None else str(session.last_error)
                found.append({"placement": placement, "last_error": error, **counts})
        return found

    def attached(self) -> bool:
        """Whether every session has a service for its next step."""
        return all(
            session is not None and session.last_error is None for session in self._sessions()
        )

    def sample(self) -> None:
        """Until `sampled`, keep what the last rows of each forward select and attend to."""
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention
        from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

        self._sampled = {}

        def keep(name: str, rows: torch.Tensor) -> None:
            self._sampled.setdefault(name, []).append(rows[-SAMPLED_ROWS:].clone())

        def selected(_: Any, arguments: Any, output: torch.Tensor) -> None:
            keep("selections", output[: len(arguments[0])])

        def attended(_: Any, __: Any, output: torch.Tensor) -> None:
            keep("attention", output.flatten(1))

        self._hooks = []
        for module in self.model_runner.get_model().modules():
            if isinstance(module, SparseAttnIndexer):
                self._hooks.append(module.register_forward_hook(selected))
            elif isinstance(module, MLAAttention):
                self._hooks.append(module.register_forward_hook(attended))

    def sampled(self, path: str, layers: int) -> None:
        """Write what the last forward has left: selections and attention, [layers, rows, ...]."""
        for hook in self._hooks:
            hook.remove()
        last = {name: torch.stack(kept[-layers:]).cpu() for name, kept in self._sampled.items()}
        torch.save(last, path)

    def time_replays(self) -> None:
        """From now on take the time of each graph that is replayed, on the GPU."""
        self._events, self._replay = [], torch.cuda.CUDAGraph.replay

        def replay(graph: Any) -> None:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            self._replay(graph)
            after.record()
            self._events.append((before, after))

        torch.cuda.CUDAGraph.replay = replay

    def replay_times(self) -> list[float]:
        """Milliseconds of every replay since `time_replays`, which ends."""
        torch.cuda.CUDAGraph.replay = self._replay
        if self._events:
            torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in self._events]

    def _sessions(self) -> list[Any]:
        """Of all models here; None for one that has none."""
        if "attention_worker.plugin.sessions" not in sys.modules:
            return []
        from attention_worker.plugin.sessions import open_steps

        # On a CPU the session has another name, and there is none inline.
        return [
            getattr(steps, "indexer", getattr(steps, "session", None)) for steps in open_steps()
        ]
