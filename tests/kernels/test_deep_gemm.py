"""The adapters of other projects' logits: what they are handed, and what becomes of what they give.

The stand-ins score right but, as the real ones, trust their arguments: they fail where those could
lead a kernel astray, and leave rubbish past a row's length. On a GPU with DeepGEMM the real one.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

from indexer_service.kernels import mqa_logits
from indexer_service.kernels.checks import E4M3
from indexer_service.kernels.mqa_logits import deep_gemm, xpu
from tests.kernels import inputs

PAGE, DIM, RUBBISH = 64, 128, 1e30


def scored(
    q: Tensor, k_cache: Tensor, weights: Tensor, lengths: Tensor, table: Tensor, width: int
) -> Tensor:
    """The reference's scores of arguments that must be as the real kernels need them."""
    assert q.dtype == E4M3 and q.is_contiguous() and k_cache.shape[2] == 1
    assert weights.is_contiguous() and lengths.is_contiguous() and table.stride(1) == 1
    assert int(table.min()) >= 0 and int(table.max()) < len(k_cache)
    assert int(lengths.max()) <= table.shape[1] * PAGE
    cache = k_cache.squeeze(2)
    return mqa_logits.paged(q, cache, weights, lengths, table, width, impl="reference")


def ragged_scored(
    q: Tensor, k: Tensor, scale: Tensor, weights: Tensor, start: Tensor, end: Tensor
) -> Tensor:
    assert q.dtype == k.dtype == E4M3
    assert all(each.is_contiguous() for each in (q, k, scale, weights, start, end))
    assert int(start.min()) >= 0 and int(end.max()) <= len(k)
    return mqa_logits.ragged(q, k, scale, weights, start, end, impl="reference")


class DeepGemm(ModuleType):
    """The package's three functions."""

    def get_num_sms(self) -> int:
        return 132

    def get_paged_mqa_logits_metadata(self, lengths: Tensor, page: int, sms: int) -> Tensor:
        assert lengths.dim() == 2 and lengths.is_contiguous() and page == PAGE
        assert int(lengths.min()) >= 1, "all-zero lengths send it out of bounds"
        return torch.zeros((sms + 1, 2), dtype=torch.int32)

    def fp8_paged_mqa_logits(
        self,
        q: Tensor,
        k_cache: Tensor,
        weights: Tensor,
        lengths: Tensor,
        table: Tensor,
        schedule: Tensor,
        width: int,
        clean: bool,
    ) -> Tensor:
        assert schedule.shape == (133, 2) and not clean
        assert table.shape[1] % 4 == 0, "it reads a table four columns at a time"
        scores = scored(q, k_cache, weights, lengths, table, width)
        stride = -(-width // 256) * 256
        padded = torch.full((len(scores), stride), RUBBISH)
        padded[:, :width] = scores.masked_fill(scores == -torch.inf, RUBBISH)
        return padded[:, :width]

    def fp8_mqa_logits(
        self,
        q: Tensor,
        keys: tuple[Tensor, Tensor],
        weights: Tensor,
        start: Tensor,
        end: Tensor,
        clean: bool,
    ) -> Tensor:
        assert not clean and bool((start <= end).all())
        scores = ragged_scored(q, *keys, weights, start, end)
        return scores.masked_fill(scores == -torch.inf, RUBBISH)


@pytest.fixture(params=["deep_gemm", "xpu"])
def adapter(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """An adapter's module, with its stand-in where it looks for the real thing."""
    if request.param == "deep_gemm":
        monkeypatch.setitem(sys.modules, "deep_gemm", DeepGemm("deep_gemm"))
        deep_gemm._package.cache_clear()
        yield deep_gemm
        deep_gemm._package.cache_clear()
        return
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define(
        "xpu_fp8_paged_mqa_logits(Tensor q, Tensor kv_cache, Tensor weights, Tensor context_lens,"
        " Tensor block_tables, Tensor? schedule_metadata, SymInt max_model_len) -> Tensor"
    )
    library.define(
        "xpu_fp8_mqa_logits(Tensor q, Tensor k_quant, Tensor k_scale, Tensor weights,"
        " Tensor cu_seqlen_ks, Tensor cu_seqlen_ke) -> Tensor"
    )

    def paged(
        q: Tensor,
        k_cache: Tensor,
        weights: Tensor,
        lengths: Tensor,
        table: Tensor,
        schedule: Tensor | None,
        width: int,
    ) -> Tensor:
        assert lengths.dim() == 1
        return scored(q, k_cache, weights, lengths, table, width)

    library.impl("xpu_fp8_paged_mqa_logits", paged, "CPU")
    library.impl("xpu_fp8_mqa_logits", ragged_scored, "CPU")
    yield xpu
    library._destroy()


def by_adapter(adapter: ModuleType, case: inputs.Paged, width: int) -> Tensor:
    q, k_cache, weights, seq_lens, table = case.tensors
    out = torch.full((len(weights), width), torch.nan)
    adapter.paged(q, k_cache, weights, seq_lens, table, out)
    return out


def by_reference(case: inputs.Paged, width: int) -> Tensor:
    return mqa_logits.paged(*case.tensors, width, impl="reference")


def case_of(lengths: list[int], next_n: int = 1) -> inputs.Paged:
    return inputs.paged(lengths, next_n=next_n, heads=32, dim=DIM, page=PAGE)


@pytest.mark.parametrize("next_n", [1, 2])
def test_lengths_of_every_kind(adapter: ModuleType, next_n: int) -> None:
    case = case_of([65, 0, 1, 200, -3], next_n)
    for width in (1, 64, 130, 300):
        assert torch.equal(by_adapter(adapter, case, width), by_reference(case, width))


def test_every_length_is_zero(adapter: ModuleType) -> None:
    case = case_of([0] * 32)
    assert bool((by_adapter(adapter, case, 64) == -torch.inf).all())


def test_an_earlier_row_may_see_more_than_the_last(adapter: ModuleType) -> None:
    case = case_of([200, 200], next_n=2)
    case.seq_lens = torch.tensor([[190, 3], [0, 200]], dtype=torch.int32)
    assert torch.equal(by_adapter(adapter, case, 200), by_reference(case, 200))


def test_lengths_that_lie_apart(adapter: ModuleType) -> None:
    case = case_of([100, 70], next_n=2)
    case.seq_lens = torch.tensor([[99, 100, 7, 7], [69, 70, 7, 7]], dtype=torch.int32)[:, :2]
    assert torch.equal(by_adapter(adapter, case, 128), by_reference(case, 128))


def test_pages_outside_the_cache_score_nan(adapter: ModuleType) -> None:
    case = case_of([200, 200])
    case.block_table[0, 1] = -1
    case.block_table[1, 2] = len(case.k_cache)
    seen, expected = by_adapter(adapter, case, 256), by_reference(case, 256)
    assert torch.equal(seen.isnan(), expected.isnan()) and bool(seen.isnan().any())
    assert torch.equal(seen.nan_to_num(), expected.nan_to_num())


def test_lengths_past_the_table(adapter: ModuleType) -> None:
    case = case_of([200, 120])
    case.block_table = case.block_table[:, :2]
    assert torch.equal(by_adapter(adapter, case, 300), by_reference(case, 300))


def test_ragged_bounds_of_every_kind(adapter: ModuleType) -> None:
    bounds = [(0, 10), (5, 90), (-7, 40), (30, 30), (50, 20), (0, 1000)]
    case = inputs.ragged(bounds, 90, heads=32, dim=DIM)
    out = torch.full((len(bounds), 90), torch.nan)
    adapter.ragged(*case.tensors, out)
    assert torch.equal(out, mqa_logits.ragged(*case.tensors, impl="reference"))


def test_nothing_to_score(adapter: ModuleType) -> None:
    case = inputs.ragged([(0, 4)], 0, heads=32, dim=DIM)
    adapter.ragged(*case.tensors, torch.empty(1, 0))
    empty = case_of([])
    assert by_adapter(adapter, empty, 64).shape == (0, 64)


def test_xpu_is_not_supported_without_its_operations() -> None:
    case = case_of([10])
    assert "not registered" in (xpu.paged_unsupported(case.q, case.k_cache) or "")
    assert "not registered" in (xpu.ragged_unsupported(case.q[:, 0]) or "")


@pytest.mark.parametrize("adapter", ["xpu"], indirect=True)
def test_xpu_shapes(adapter: ModuleType) -> None:
    case = case_of([10])
    assert adapter.paged_unsupported(case.q, case.k_cache) is None
    assert adapter.ragged_unsupported(case.q[:, 0]) is None
    other = inputs.paged([10], heads=8, dim=32, page=16)
    assert "tokens are not 64" in adapter.paged_unsupported(other.q, other.k_cache)
    assert "8 heads" in adapter.paged_unsupported(other.q, case.k_cache)


@pytest.mark.parametrize("adapter", ["deep_gemm"], indirect=True)
def test_deep_gemm_devices_and_shapes(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a real one only on a GPU: here a query says that it is on one."""

    class OnGpu(Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    case = case_of([10])
    assert "it needs SM90" in adapter.paged_unsupported(case.q, case.k_cache)
    q = case.q.as_subclass(OnGpu)
    assert adapter.paged_unsupported(q, case.k_cache) is None
    assert "next_n 3" in adapter.paged_unsupported(q.expand(-1, 3, -1, -1), case.k_cache)
    assert "tokens are not 64" in adapter.paged_unsupported(q, case.k_cache.view(-1, 32, DIM + 4))
    whole = torch.zeros(2 * PAGE * (DIM + 4) + 8, dtype=torch.uint8)
    apart = whole.as_strided((2, PAGE, DIM + 4), (PAGE * (DIM + 4) + 4, DIM + 4, 1))
    assert "multiples of 16" in adapter.paged_unsupported(q, apart)
    assert "16 heads" in adapter.ragged_unsupported(q[:, 0, :16])
    capability = (8, 0)
    assert "it needs SM90" in adapter.ragged_unsupported(q[:, 0])
    capability = (9, 0)
    monkeypatch.setenv("DSA_INDEXER_FORCE_ARCH", "80")
    assert "DSA_INDEXER_FORCE_ARCH" in adapter.ragged_unsupported(q[:, 0])
    monkeypatch.delenv("DSA_INDEXER_FORCE_ARCH")
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    adapter._package.cache_clear()
    assert "cannot be imported" in adapter.ragged_unsupported(q[:, 0])


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DeepGEMM itself, as a package or as the copy that vLLM brings along."""
    try:
        import_module("deep_gemm")
    except ImportError:
        copy = pytest.importorskip(
            "vllm.third_party.deep_gemm", reason="neither DeepGEMM nor vLLM's copy is installed"
        )
        monkeypatch.setitem(sys.modules, "deep_gemm", copy)
    deep_gemm._package.cache_clear()
    yield
    deep_gemm._package.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("next_n", [1, 2])
def test_real_paged(real: None, heads: int, next_n: int) -> None:
    case = inputs.paged([4000, 0, 65, 1, 700], next_n=next_n, heads=heads, dim=DIM, page=PAGE)
    case.block_table[0, 3] = -1
    tensors = [tensor.cuda() for tensor in case.tensors]
    seen = mqa_logits.paged(*tensors, 4096, impl="deepgemm").cpu()
    close(seen, by_reference(case, 4096))


@pytest.mark.gpu
def test_real_ragged(real: None) -> None:
    bounds = [(0, 10), (5, 900), (-7, 40), (30, 30), (50, 20), (0, 1000)] * 10
    case = inputs.ragged(bounds, 900, heads=64, dim=DIM)
    tensors = [tensor.cuda() for tensor in case.tensors]
    seen = mqa_logits.ragged(*tensors, impl="deepgemm").cpu()
    close(seen, mqa_logits.ragged(*case.tensors, impl="reference"))


@pytest.mark.gpu
def test_real_drops_the_nan_of_a_key(real: None) -> None:
    """What the adapter's docstring says of it: the promise of `mqa_logits` is not kept there."""
    case = inputs.ragged([(0, 100)], 100, heads=64, dim=DIM)
    case.k[7, 3] = 0x7F
    tensors = [tensor.cuda() for tensor in case.tensors]
    assert bool(mqa_logits.ragged(*case.tensors, impl="reference")[0, 7].isnan())
    assert float(mqa_logits.ragged(*tensors, impl="deepgemm")[0, 7]) == 0.0


def close(seen: Tensor, expected: Tensor) -> None:
    """The same NaN and -inf, and 5e-4 in norm elsewhere."""
    finite = expected.isfinite()
    assert torch.equal(seen.isnan(), expected.isnan())
    assert torch.equal(seen == -torch.inf, expected == -torch.inf)
    error = (seen[finite].double() - expected[finite].double()).norm()
    assert float(error) <= 5e-4 * float(expected[finite].double().norm())
