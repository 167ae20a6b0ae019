"""One engine of the vLLM comparison: prints what it answered, and how fast, as a JSON line.

    python benchmarks/vllm_gpu_engine.py BACKEND [--eager] [--times] [--tune]

In one process, where vLLM's dummy weights can be replaced: they are so small that attention
vanishes from the result. The plugin's variables say where indices come from.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from deepseek_v32 import config

LAYERS, HEADS, INDEX_HEADS, TOP_K, VOCABULARY = 8, 16, 64, 2048, 2048
LONGEST = 140_000
CAPTURED = [1, 8, 32]
ROWS = ((1, 4096), (1, 65536), (8, 16384), (32, 4096), (1, 131072))
"""Requests and tokens of each, whose decode steps are timed."""
TIMED_TOKENS, ROUNDS = 64, 3
CHECKED_TOKENS = 16

CONFIG = config(
    hidden=1024,
    layers=LAYERS,
    heads=HEADS,
    vocabulary=VOCABULARY,
    longest=262144,
    q_lora=512,
    index_heads=INDEX_HEADS,
    top_k=TOP_K,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--tune", action="store_true")
    asked = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    began = time.monotonic()
    engine = start(asked.backend, eager=asked.eager, tune=asked.tune)
    found: dict[str, Any] = {"start_seconds": round(time.monotonic() - began, 1)}
    try:
        found["prefill"] = prefill(engine)
        found["decode"] = decode(engine)
        found["again"] = decode(engine)
        if asked.times:
            found["milliseconds"] = times(engine)
        found["statistics"] = statistics()
    finally:
        print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)  # Nothing of what vLLM does at its end is asked for.


def start(backend: str, *, eager: bool, tune: bool) -> Any:
    import vllm.model_executor.model_loader.dummy_loader as dummy

    dummy.initialize_dummy_weights = unit_gain
    if not tune:
        # Tuned kernels select the same bits, and tuning takes minutes.
        from indexer_service.kernels import warm_up

        warm_up.tuned_operations = lambda geometry, device: iter(())
    from vllm import LLM

    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURED}
    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=LONGEST,
        max_num_seqs=max(CAPTURED),
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.25,
        attention_backend=backend,
        enforce_eager=eager,
        **({} if eager else {"compilation_config": graphs}),
    )


def unit_gain(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Weights with which every layer, and every token that is attended to, moves the logits."""
    generator = torch.Generator(device="cuda").manual_seed(20)
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            values = torch.randn(weight.shape, generator=generator, device=weight.device)
            weight.data.copy_((values * weight.shape[-1] ** -0.5).to(weight.dtype))
        else:
            weight.data.fill_(0.0 if name.endswith("bias") else 1.0)


def prompts(requests: int, tokens: int) -> list[dict[str, list[int]]]:
    return [
        {
            "prompt_token_ids": torch.randint(
                2, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(request)
            ).tolist()
        }
        for request in range(requests)
    ]


def prefill(engine: Any) -> list[list[float]]:
    """Log-probabilities of the last tokens of prompts longer than k: nothing is chosen."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = engine.generate(prompts(2, 3 * TOP_K), sampling, use_tqdm=False)
    return [
        [next(iter(each.values())).logprob for each in output.prompt_logprobs[-512:]]
        for output in outputs
    ]


def decode(engine: Any) -> dict[str, list[Any]]:
    """Greedy tokens with log-probabilities, by batch; nothing is taken from the prefix cache."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=CHECKED_TOKENS, temperature=0, logprobs=0, ignore_eos=True, detokenize=False
    )
    answers = {}
    for requests, tokens in ((1, 4096), (5, 3000), (32, 2200)):
        engine.reset_prefix_cache()
        outputs = engine.generate(prompts(requests, tokens), sampling, use_tqdm=False)
        answers[f"{requests} x {tokens}"] = [
            [
                list(output.outputs[0].token_ids),
                [next(iter(each.values())).logprob for each in output.outputs[0].logprobs],
            ]
            for output in outputs
        ]
    return answers


def times(engine: Any) -> dict[str, float]:
    """Wall-clock milliseconds a token, medians."""
    from vllm import SamplingParams

    def seconds(requests: list[Any], tokens: int) -> float:
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        engine.generate(requests, sampling, use_tqdm=False)
        return time.perf_counter() - began

    found = {}
    for requests, tokens in ROWS:
        asked = prompts(requests, tokens)
        seconds(asked, 2)  # The prompts are cached from here on.
        each = [
            (seconds(asked, TIMED_TOKENS + 1) - seconds(asked, 1)) / TIMED_TOKENS
            for _ in range(ROUNDS)
        ]
        found[f"{requests} x {tokens}"] = round(1e3 * median(each), 3)
    return found


def statistics() -> list[dict[str, Any]]:
    """Of the plugin's sessions."""
    if "attention_worker.plugin.sessions" not in sys.modules:
        return []
    from dataclasses import asdict

    from attention_worker.plugin.sessions import open_steps

    return [
        {
            "placement": str(steps.indexer.placement),
            "last_error": str(steps.indexer.last_error),
            **asdict(steps.indexer.statistics),
        }
        for steps in open_steps()
    ]


if __name__ == "__main__":
    main()
