"""Top-k with far more blocks than fit, on a GPU that is held: none of them may wait for another."""

import pytest
import torch
import triton
import triton.language as tl

from indexer_service.kernels import topk
from indexer_service.kernels.topk import launch
from indexer_service.kernels.topk.plan import GROUP, MOST_SPLITS, SHORT, Plan

pytestmark = pytest.mark.gpu

SECONDS = 4
ROUNDS = 5
FREE = 4
ROWS, WIDTH, K = 100, 1 << 17, 2048


@triton.jit
def hold(ended, nanoseconds):
    """Keeps its place on a multiprocessor for so long."""
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    tl.store(ended + tl.program_id(0), now)


def select(scores: torch.Tensor) -> torch.Tensor:
    """6,400 blocks, of which even an idle GPU holds a few hundred."""
    plan = Plan(SHORT, splits=MOST_SPLITS, programs=ROWS, groups=SHORT.capacity // GROUP)
    out = torch.full((ROWS, K), 77, dtype=torch.int32, device="cuda")
    launch.run(plan, scores, K, out, arrived=torch.zeros(ROWS, dtype=torch.int32, device="cuda"))
    return out


def test_it_finishes_where_few_of_its_blocks_fit_at_once() -> None:
    """V/41189, V/43008, flashinfer/3615: blocks waited for blocks that were not resident."""
    scores = torch.rand((2, ROWS, WIDTH), generator=torch.Generator("cuda"), device="cuda")
    expected = [topk.select(rows, K, impl="reference") for rows in scores]
    # Every kernel is loaded before the GPU is held: loading one may wait for those that run.
    assert torch.equal(select(scores[0]), expected[0])
    # All multiprocessors but a few, as full as these blocks make them.
    held = torch.cuda.get_device_properties(0).multi_processor_count - FREE
    ended = torch.empty(held, dtype=torch.int64, device="cuda")
    hold[(held,)](ended, 1, num_warps=32)
    holder, *others = (torch.cuda.Stream() for _ in range(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(holder):
        hold[(held,)](ended, SECONDS * 10**9, num_warps=32)
    for _ in range(ROUNDS):
        chosen = []
        for rows, stream in zip(scores, others, strict=True):
            with torch.cuda.stream(stream):
                chosen.append(select(rows))
        for ours, right, stream in zip(chosen, expected, others, strict=True):
            stream.synchronize()
            with torch.cuda.stream(stream):
                assert torch.equal(ours, right)
    assert not holder.query(), "the GPU was not held all the time: nothing is shown"
    torch.cuda.synchronize()
