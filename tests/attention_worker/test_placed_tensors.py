"""What a worker on a GPU refuses of a step's tensors: kernels would read other values."""

from dataclasses import replace

import pytest
import torch

from attention_worker.device_steps import DeviceSteps
from attention_worker.inline_kernels import InlineKernels
from indexer_client import ClientSettings, StepInputs
from indexer_client.attachment import AttachRequest, worker_identity
from ipc_handoff.banks import BankPool, HostBank
from ipc_handoff.layout import HandoffGeometry

GEOMETRY = HandoffGeometry(
    layers=(3, 7), heads=16, head_dim=8, top_k=8, page_size=32, max_rows=8, max_requests=4,
    max_context=128, slots=2,
)  # fmt: skip
CACHE = torch.zeros((8, 32, 12), dtype=torch.uint8)
CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
ROWS = REQUESTS = 3
INPUTS = StepInputs(
    query_start=torch.arange(REQUESTS + 1, dtype=torch.int32),
    seq_lens=torch.full((REQUESTS,), 9, dtype=torch.int32),
    block_table=torch.zeros((REQUESTS, 2), dtype=torch.int32),
    rows=ROWS, decode_requests=REQUESTS, rows_per_decode=1, max_length=50,
    exact_query_start=tuple(range(REQUESTS + 1)),
    positions=torch.full((ROWS,), 8), slots=torch.full((ROWS,), 8),
)  # fmt: skip
TENSORS = {
    "q": torch.zeros((ROWS, 16, 8), dtype=torch.uint8),
    "weights": torch.zeros((ROWS, 16)),
    "out": torch.full((ROWS, 8), -2, dtype=torch.int32),
}


def _with_holes(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every other element of the last axis."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one axis behind another in memory."""
    return tensor.mT.contiguous().mT


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> DeviceSteps:
    request = AttachRequest(
        ClientSettings(address="unix:/nowhere/i.sock"), worker_identity("refused"), GEOMETRY, {},
        "", None,
    )  # fmt: skip
    kernels = InlineKernels(GEOMETRY, {3: CACHE, 7: CACHE}, CPU)
    monkeypatch.setattr(kernels, "take", lambda *arguments: None)
    monkeypatch.setattr(kernels, "select", lambda *arguments: None)
    pool = BankPool(lambda number: HostBank(GEOMETRY, number), banks=0)
    return DeviceSteps(request, pool, kernels, None, device=CPU)


@pytest.mark.parametrize("name", ["query_start", "seq_lens", "block_table", "positions", "slots"])
def test_a_steps_tensors_have_no_holes_and_are_on_the_workers_device(
    worker: DeviceSteps, name: str
) -> None:
    tensor = getattr(INPUTS, name)
    with pytest.raises(ValueError, match=rf"^{name}: strides .*\(fix: .*{name}\.contiguous\(\)"):
        worker.begin_step(replace(INPUTS, **{name: _with_holes(tensor)}))
    with pytest.raises(ValueError, match=rf"^{name}: on meta \(fix: cpu"):
        worker.begin_step(replace(INPUTS, **{name: tensor.to(ELSEWHERE)}))
    assert worker.begin_step(INPUTS) == 1, "a refused step is none"


@pytest.mark.parametrize("name", TENSORS)
def test_a_layers_tensors_have_contiguous_rows_and_are_on_the_workers_device(
    worker: DeviceSteps, name: str
) -> None:
    worker.begin_step(INPUTS)
    tensor = TENSORS[name]
    for other in (_with_holes(tensor), _transposed(tensor)):
        assert torch.equal(other, tensor)
        with pytest.raises(ValueError, match=rf"^{name}: strides .*\(fix: .*contiguous"):
            worker.select(3, **{**TENSORS, name: other})
    with pytest.raises(ValueError, match=rf"^{name}: on meta \(fix: cpu"):
        worker.select(3, **{**TENSORS, name: tensor.to(ELSEWHERE)})


def test_rows_may_lie_apart(worker: DeviceSteps) -> None:
    """Of tables and selections engines give the first rows of something wider."""
    wide = torch.zeros((REQUESTS, 64), dtype=torch.int32)[:, :2]
    worker.begin_step(replace(INPUTS, block_table=wide))
    worker.select(3, **{**TENSORS, "out": torch.zeros((ROWS, 64), dtype=torch.int32)[:, :8]})


@pytest.mark.parametrize("name", ["q", "weights", "out"])
def test_a_layers_tensors_have_the_agreed_dtype_and_shape(worker: DeviceSteps, name: str) -> None:
    worker.begin_step(INPUTS)
    tensor = TENSORS[name]
    for other in (tensor.to(torch.float64), tensor[..., :-1]):
        with pytest.raises(ValueError, match=rf"^{name}: .*\(fix: "):
            worker.select(3, **{**TENSORS, name: other})
