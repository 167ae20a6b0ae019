"""An engine in a process of its own, told by JSON lines on stdin what to do.

    engine_program.py MODEL REPLIES OPTIONS

REPLIES is the number of a file descriptor that answers go to, a line each; OPTIONS are vLLM's, in
JSON. Requests: ["generate", prompts, gate], ["call", method, *arguments] of the workers'
extension, which gives a list with each one's answer, ["reset"] of the prefix cache.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MAX_TOKENS = 12
BEFORE_FIRST_STEP_SECONDS = 1.0


def main() -> None:
    from vllm import LLM

    model, replies, options = sys.argv[1:]
    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        # Less than most prompts have: they are prefilled in chunks, beside decodes.
        max_num_batched_tokens=128,
        num_gpu_blocks_override=64,
        kv_cache_memory_bytes=256 << 20,
        worker_extension_cls="tests.vllm.worker_extension.WorkerExtension",
        **json.loads(options),
    )
    if json.loads(options).get("pipeline_parallel_size", 1) > 1:
        # In it a later stage makes the buffers that it needs.
        engine.collective_rpc("warm_up")
    with os.fdopen(int(replies), "w", buffering=1) as out:
        print(json.dumps("started"), file=out)
        for line in sys.stdin:
            print(json.dumps(answer(engine, *json.loads(line))), file=out)


def answer(engine: Any, what: str, *arguments: Any) -> Any:
    if what == "generate":
        return generate(engine, *arguments)
    if what == "call":
        method, *rest = arguments
        return engine.collective_rpc(method, args=tuple(rest))
    return engine.reset_prefix_cache()


def generate(engine: Any, prompts: list[list[int]], gate: str) -> list[dict[str, Any]]:
    """Greedy answers with log-probabilities, of requests that all arrive before the first step.

    A batch's composition moves bits of vLLM's own layers on a CPU: it must not depend on how
    fast requests travel to the engine's core.
    """
    from vllm import SamplingParams

    engine.collective_rpc("hold", args=(gate,))
    sampling = SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, logprobs=5, detokenize=False
    )
    engine.enqueue([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    time.sleep(BEFORE_FIRST_STEP_SECONDS)
    Path(gate).touch()
    outputs = engine.wait_for_completion(use_tqdm=False)
    Path(gate).unlink()
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                {str(token): each.logprob for token, each in position.items()}
                for position in output.outputs[0].logprobs
            ],
            "cached": output.num_cached_tokens,
        }
        for output in outputs
    ]


if __name__ == "__main__":
    main()
