"""One engine of the vLLM comparison, told by JSON lines on stdin what to do.

    python benchmarks/vllm_gpu_engine.py SIZE REPLIES OPTIONS

SIZE: a name of `vllm_gpu_model.SIZES`. REPLIES: number of a file descriptor that answers go to, a
line each. OPTIONS: of `vllm.LLM`, in JSON. A request is [what, *arguments], by the names of `WHAT`.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from vllm_gpu_model import SIZES, Batch, Size, prompts

HERE = Path(__file__).parent


def main() -> None:
    name, replies, options = sys.argv[1:]
    size, began = SIZES[name], time.monotonic()
    with os.fdopen(int(replies), "w", buffering=1) as out:
        engine = start(size, json.loads(options))
        started = {"start_seconds": round(time.monotonic() - began, 1), "blocks": blocks(engine)}
        print(json.dumps(started), file=out)
        for line in sys.stdin:
            what, *arguments = json.loads(line)
            print(json.dumps(WHAT[what](engine, size, *arguments)), file=out)
    os._exit(0)  # Nothing of what vLLM does at its end is asked for.


def start(size: Size, options: dict[str, Any]) -> Any:
    from vllm import LLM

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(size.config))
    if not options.get("enforce_eager"):
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(size.captured),
        }
    # A later stage of a pipeline, or another rank, imports the extension too.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=max(size.captured),
        worker_extension_cls="vllm_gpu_worker.WorkerExtension",
        **{**size.options, **options},
    )


def blocks(engine: Any) -> int | None:
    """Of the KV cache, as vLLM has planned it."""
    found: int | None = engine.llm_engine.vllm_config.cache_config.num_gpu_blocks
    return found


def prefill(engine: Any, size: Size, path: str) -> list[list[float]]:
    """Log-probabilities of prompts' last tokens: nothing is chosen. Samples are written to `path`,
    unless it is empty."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    if path:
        engine.collective_rpc("sample")
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = engine.generate(prompts(size, size.prefill), sampling, use_tqdm=False)
    if path:
        engine.collective_rpc("sampled", args=(path, size.config["num_hidden_layers"]))
    return [
        [next(iter(each.values())).logprob for each in output.prompt_logprobs[-512:] if each]
        for output in outputs
    ]


def decode(engine: Any, size: Size) -> dict[str, list[Any]]:
    """Greedy tokens with log-probabilities, by batch; nothing is taken from the prefix cache."""
    return {
        named(batch): _answers(engine, size, batch, size.checked_tokens) for batch in size.decode
    }


def load(engine: Any, size: Size) -> list[Any]:
    """The answers to the longest batch: something happens to the service in the meantime."""
    return _answers(engine, size, size.load, size.load_tokens)


def _answers(engine: Any, size: Size, batch: Batch, tokens: int) -> list[Any]:
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    sampling = SamplingParams(
        max_tokens=tokens, temperature=0, logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs = engine.generate(prompts(size, batch), sampling, use_tqdm=False)
    return [
        [
            list(output.outputs[0].token_ids),
            [next(iter(each.values())).logprob for each in output.outputs[0].logprobs],
        ]
        for output in outputs
    ]


def times(engine: Any, size: Size, row: Batch) -> dict[str, float]:
    """Milliseconds of a decode step: on the GPU (median of the replays) and by the clock."""
    asked = prompts(size, row)
    _seconds(engine, asked, 2)  # The prompts are cached from here on.
    engine.collective_rpc("time_replays")
    one = _seconds(engine, asked, 1)
    many = _seconds(engine, asked, size.timed_tokens + 1)
    replays, *_ = engine.collective_rpc("replay_times")
    found = {"wall": 1e3 * (many - one) / size.timed_tokens}
    if replays:
        found["gpu"] = median(replays)
    return found


def _seconds(engine: Any, asked: list[Any], tokens: int) -> float:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    engine.generate(asked, sampling, use_tqdm=False)
    return time.perf_counter() - began


def statistics(engine: Any, size: Size) -> list[list[dict[str, Any]]]:
    """Of each worker's sessions."""
    found: list[list[dict[str, Any]]] = engine.collective_rpc("statistics")
    return found


def attached(engine: Any, size: Size, seconds: float) -> bool:
    """Whether every session has a service again, within so long."""
    deadline = time.monotonic() + seconds
    while not all(engine.collective_rpc("attached")):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def named(batch: Batch) -> str:
    return f"{batch[0]} x {batch[1]}"


WHAT: dict[str, Callable[..., Any]] = {
    "prefill": prefill,
    "decode": decode,
    "load": load,
    "times": times,
    "statistics": statistics,
    "attached": attached,
}


if __name__ == "__main__":
    main()
