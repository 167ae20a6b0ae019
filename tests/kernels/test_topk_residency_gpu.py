"""Top-k among kernels that hold the GPU: none of its blocks may wait for another."""

import pytest
import torch
import triton
import triton.language as tl

from indexer_service.kernels import topk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SECONDS = 4
ROUNDS = 20


@triton.jit
def hold(ended, nanoseconds):
    """Keeps its place on a multiprocessor for so long."""
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    tl.store(ended + tl.program_id(0), now)


def test_it_finishes_where_few_of_its_blocks_fit_at_once() -> None:
    """V/41189, V/43008, flashinfer/3615: blocks waited for blocks that were not resident."""
    scores = torch.rand((2, 1, 1 << 20), device="cuda")
    expected = [topk.select(row.cpu(), 2048, impl="reference") for row in scores]
    for row in scores:
        topk.select(row, 2048, impl="triton")  # compiled before the GPU is held
    # Blocks of 1024 threads, two a multiprocessor: all but two of the places there are.
    blocks = 2 * torch.cuda.get_device_properties(0).multi_processor_count - 2
    ended = torch.empty(blocks, dtype=torch.int64, device="cuda")
    hold[(blocks,)](ended, 1, num_warps=32)
    holder, *others = (torch.cuda.Stream() for _ in range(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(holder):
        hold[(blocks,)](ended, SECONDS * 10**9, num_warps=32)
    for _ in range(ROUNDS):
        chosen = []
        for row, stream in zip(scores, others, strict=True):
            with torch.cuda.stream(stream):
                chosen.append(topk.select(row, 2048, impl="triton"))
        for ours, right, stream in zip(chosen, expected, others, strict=True):
            with torch.cuda.stream(stream):
                assert torch.equal(ours.cpu(), right)
    assert not holder.query(), "the GPU was not held all the time: nothing is shown"
    torch.cuda.synchronize()
