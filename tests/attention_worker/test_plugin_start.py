"""What the plugin decides when an engine starts. No vLLM is needed."""

from types import SimpleNamespace

import pytest
import torch

from attention_worker.plugin.layers import Model, k_caches, layer_number, model_of
from attention_worker.plugin.limits import check_engine
from attention_worker.plugin.settings import PluginSettings, asks_for_plugin, asks_for_service
from attention_worker.vllm_compat import VERSIONS, Evidence, why_not
from indexer_client import ClientSettings
from tests.vllm.made_up import config


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ClientSettings.model_fields, *PluginSettings.model_fields):
        monkeypatch.delenv(f"DSA_INDEXER_{name.upper()}", raising=False)


@pytest.mark.parametrize("name", VERSIONS)
def test_versions_that_were_run_are_served(name: str) -> None:
    only_read = VERSIONS[name] is Evidence.READ
    refusal = why_not(f"{name}.1.post2+cu130", allow_untested=False)
    assert (refusal is not None) == only_read
    if refusal:
        assert name in refusal and "DSA_INDEXER_ALLOW_UNTESTED=1" in refusal
        assert "\n" not in refusal
    assert why_not(f"{name}.0", allow_untested=True) is None


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "1.26", "dev", "0.3", "0.260.1"])
def test_other_versions_are_not(version: str) -> None:
    refusal = why_not(version, allow_untested=True)
    assert refusal == f"vLLM {version} was found, 0.26 to 0.33 are supported"


def test_an_engine_that_is_served() -> None:
    check_engine(config())
    check_engine(config(attention={"indexer_kv_dtype": "auto", "use_fp4_indexer_cache": False}))


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (config(decode_context_parallel_size=2), "decode_context_parallel_size"),
        (config(prefill_context_parallel_size=2), "prefill_context_parallel_size"),
        (config(use_ubatching=True), "enable_dbo"),
        (config(attention={"indexer_kv_dtype": "mxfp4"}), "indexer_kv_dtype"),
        (config(attention={"use_fp4_indexer_cache": True}), "indexer_kv_dtype"),
        (config(model={"index_n_heads": 48}), "index_n_heads"),
        (config(model={"index_head_dim": 64}), "index_head_dim"),
        (config(model={"index_topk": 8192}), "index_topk"),
    ],
)
def test_an_engine_that_is_not_is_told_why(wrong: SimpleNamespace, names: str) -> None:
    with pytest.raises(ValueError, match=rf"^{names}: .*not served .*\(fix: "):
        check_engine(wrong)


def test_without_a_variable_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not asks_for_plugin(ClientSettings())
    monkeypatch.setenv("DSA_INDEXER_ADDRESS", "")
    assert not asks_for_plugin(ClientSettings())


@pytest.mark.parametrize(
    ("variable", "value", "service"),
    [
        ("ADDRESS", "unix:/run/x", True),
        ("PLACEMENT", "inline", False),
        ("PLACEMENT", "mps", True),
    ],
)
def test_an_address_or_a_placement_asks(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, service: bool
) -> None:
    monkeypatch.setenv(f"DSA_INDEXER_{variable}", value)
    assert asks_for_plugin(ClientSettings())
    assert asks_for_service(ClientSettings()) is service


def test_layers_have_numbers_and_models() -> None:
    assert layer_number("model.layers.61.self_attn.indexer.k_cache") == 61
    assert layer_number("layers.0.x") == 0
    assert model_of(60, 61) is Model.TARGET
    assert model_of(61, 61) is Model.DRAFT
    with pytest.raises(ValueError, match="no number"):
        layer_number("model.mylayers.x")


def test_caches_that_are_not_there_yet_are_left_out() -> None:
    context = {
        "layers.0.k": SimpleNamespace(kv_cache=torch.zeros(1, 64, 132)),
        "layers.1.k": SimpleNamespace(kv_cache=torch.tensor([])),
    }
    assert list(k_caches({0: "layers.0.k", 1: "layers.1.k"}, context)) == [0]
