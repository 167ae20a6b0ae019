"""What is not served is said at start: as an error, or in the log, as a setting says."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_worker.plugin import cpu_platform, indexer_metadata, sessions
from attention_worker.plugin.backend import TritonMLASparseImpl
from attention_worker.plugin.indexer_metadata import IndexerMetadataBuilder, engine_of
from attention_worker.plugin.metadata import SparseMLAMetadataBuilder
from indexer_client import AttachRefused
from indexer_client.control_plane import ControlPlane
from tests.support.waiting import eventually
from tests.vllm.made_up import NAMES, TARGET_LAYERS, batch, config

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BUILDERS = pytest.mark.parametrize("builder", [IndexerMetadataBuilder, SparseMLAMetadataBuilder])


@BUILDERS
def test_an_engine_that_is_not_served_does_not_start(builder: type) -> None:
    with pytest.raises(ValueError, match="decode_context_parallel_size: not served"):
        builder(None, NAMES, config(decode_context_parallel_size=2), CPU)


def stage(
    attention: list[int], indexers: list[int], *, dense: list[int] | None = None
) -> SimpleNamespace:
    """A worker with these layers of sparse attention, some of which select, and dense ones."""
    made_up = config(model={"num_hidden_layers": 8})
    layer = SimpleNamespace(kv_cache=torch.zeros(4, 64, 132, dtype=torch.uint8))
    sparse, plain = SimpleNamespace(use_sparse=True), SimpleNamespace(use_sparse=False)
    at = "model.layers.{}.self_attn"
    made_up.compilation_config.static_forward_context = {
        "vision.blocks.0.attn": SimpleNamespace(),
        **{f"{at.format(each)}.attn": plain for each in dense or []},
        **{f"{at.format(each)}.attn": sparse for each in attention},
        **{f"{at.format(each)}.indexer.k_cache": layer for each in indexers},
    }
    return made_up


@BUILDERS
def test_a_stage_does_not_begin_with_a_layer_whose_indices_are_elsewhere(builder: type) -> None:
    """vLLM starts such an engine, and attention reads whatever is in memory."""
    with pytest.raises(ValueError, match=r"begins with layer 4, .*VLLM_PP_LAYER_PARTITION"):
        builder(None, [], stage([4, 5, 6, 7], [5, 7]), CPU)
    with pytest.raises(ValueError, match="begins with layer 6"):
        builder(None, [], stage([6, 7, 8], [8]), CPU)  # The last one is a draft's.
    builder(None, [], stage([3, 4, 5], [3, 5]), CPU)
    builder(None, [], stage([8], [8]), CPU)
    builder(None, [], stage([2, 3], [2], dense=[0, 1]), CPU)


def gpu_engine(*, sleep_mode: bool = False) -> SimpleNamespace:
    made_up = config()
    made_up.model_config.enable_sleep_mode = sleep_mode
    return made_up


MEMORY = {
    "enable_sleep_mode": (True, {}),
    "PYTORCH_CUDA_ALLOC_CONF": (False, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "PYTORCH_ALLOC_CONF": (False, {"PYTORCH_ALLOC_CONF": "a:1,expandable_segments:True"}),
}


@pytest.fixture(params=MEMORY)
def unshared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """Name of the option, and an engine whose K caches no other process can open."""
    sleep_mode, environment = MEMORY[request.param]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DSA_INDEXER_ADDRESS", "unix:/run/x")
    indexer_metadata._warn_once.cache_clear()
    return request.param, gpu_engine(sleep_mode=sleep_mode)


def test_memory_that_cannot_be_shared_keeps_the_engine_inline(
    unshared: tuple[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    option, made_up = unshared
    with caplog.at_level(logging.WARNING, indexer_metadata.logger.name):
        engines = [engine_of(made_up, GPU) for _ in range(3)]
    assert {engine.settings.placement for engine in engines} == {"inline"}
    (line,) = caplog.messages
    assert f"{option}: " in line
    assert "(fix: " in line


def test_or_ends_it_where_a_setting_says_so(
    unshared: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    option, made_up = unshared
    monkeypatch.setenv("DSA_INDEXER_ON_REFUSAL", "error")
    with pytest.raises(ValueError, match=rf"^{option}: .*no CUDA IPC handle \(fix: "):
        engine_of(made_up, GPU)


def test_who_wants_no_service_may_have_such_memory(
    unshared: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSA_INDEXER_ON_REFUSAL", "error")
    assert engine_of(unshared[1], CPU).settings.placement == "auto"
    monkeypatch.setenv("DSA_INDEXER_PLACEMENT", "inline")
    assert engine_of(unshared[1], GPU).settings.placement == "inline"


REFUSALS = (
    "layout.version: 9, the worker has 4 (fix: the same dsa-indexer version on both sides)",
    "worker.gpu_uuid: GPU-1, the service is on GPU-2 (fix: the service of the worker's GPU)",
)
"""Of services that are there, as `tests/client` and `tests/service` provoke them."""


@pytest.fixture(params=REFUSALS, ids=["another version", "another GPU"])
def refusal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """What the service says to every worker."""

    def refuse(plane: ControlPlane, asked: Any) -> Any:
        raise AttachRefused(request.param)

    monkeypatch.setattr(ControlPlane, "open_session", refuse)
    monkeypatch.setattr(sessions, "_open", {})
    monkeypatch.setenv("DSA_INDEXER_ADDRESS", f"unix:{tmp_path / 'i.sock'}")
    return str(request.param)


def test_what_a_service_refuses_ends_the_engine_with_its_words(
    refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSA_INDEXER_ON_REFUSAL", "error")
    monkeypatch.setenv("DSA_INDEXER_ATTACH_SECONDS", "0.2")
    builder = IndexerMetadataBuilder(None, NAMES[:TARGET_LAYERS], config(), CPU)
    with pytest.raises(AttachRefused) as raised:
        builder.build(0, batch([1]))
    assert str(raised.value) == refusal


def test_or_is_logged_while_the_engine_computes_by_itself(
    refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "indexer_client"):
        builder = IndexerMetadataBuilder(None, NAMES[:TARGET_LAYERS], config(), CPU)
        steps = builder.build(0, batch([1])).steps
        assert eventually(lambda: bool(caplog.messages), 30)
    steps.close()
    assert f"not attached, working inline: {refusal}" in caplog.messages


def attention(**changed: Any) -> TritonMLASparseImpl:
    as_usual = {
        "num_heads": 4,
        "head_size": 576,
        "scale": 0.1,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "kv_lora_rank": 512,
    }
    return TritonMLASparseImpl(**{**as_usual, **changed})


def test_attention_says_which_caches_it_reads() -> None:
    for dtype in ("auto", "bfloat16", "fp8_ds_mla"):
        attention(kv_cache_dtype=dtype)
    for option, value in (("kv_cache_dtype", "fp8_e5m2"), ("kv_lora_rank", 256)):
        with pytest.raises(ValueError, match=rf"^{option}: {value} .*\(fix: "):
            attention(**{option: value})
    with pytest.raises(NotImplementedError, match="sliding window"):
        attention(sliding_window=128)


@pytest.mark.parametrize(("asked", "size"), [(True, 16), (True, 128), (False, 128), (True, 64)])
def test_on_a_cpu_another_page_size_is_refused_unless_it_is_vllms_own(
    asked: bool, size: int
) -> None:
    cache = SimpleNamespace(
        block_size=size, user_specified_block_size=asked, enable_prefix_caching=True
    )
    made_up = config()
    made_up.cache_config = cache
    made_up.scheduler_config.enable_chunked_prefill = True
    keep = cpu_platform._keep_configuration(lambda platform, vllm_config: None)
    if asked and size != 64:
        with pytest.raises(ValueError, match=rf"^block_size: {size} \(fix: 64"):
            keep(None, made_up)
    else:
        keep(None, made_up)
        assert cache.block_size == 64
