"""What installing the plugin changes in vLLM, on platforms that are made up."""

import inspect
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention_worker import vllm_compat
from tests.vllm.engines import QUIET

PROGRAM = Path(__file__).with_name("registration_program.py")
OURS = "TritonMLASparseBackend"
VERSION = "0.32.0"
NAME = "TRITON_MLA_SPARSE"
REPLACED = "<class 'attention_worker.plugin.indexer_op.ServiceIndexer'>"

CASES: dict[str, tuple[str, str, dict[str, str]]] = {
    "9.0": ("9.0", VERSION, {}),
    "10.0": ("10.0", VERSION, {}),
    "12.0": ("12.0", VERSION, {}),
    "8.0": ("8.0", VERSION, {}),
    "8.6": ("8.6", VERSION, {}),
    "8.9": ("8.9", VERSION, {}),
    "9.0, asked for": ("9.0", VERSION, {"DSA_INDEXER_PLACEMENT": "inline"}),
    "8.0, too old": ("8.0", "0.25.1", {}),
    "8.0, only read": ("8.0", "0.33.0", {}),
    "8.0, only read, allowed": ("8.0", "0.33.0", {"DSA_INDEXER_ALLOW_UNTESTED": "1"}),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What was said of each case."""
    own = {name: value for name, value in os.environ.items() if "DSA_INDEXER" not in name}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps([*CASES.values()])],
        capture_output=True,
        env={**own, **QUIET},
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {case: json.loads(line) for case, line in zip(CASES, lines, strict=True)}


@pytest.mark.parametrize("capability", ["9.0", "10.0", "12.0"])
def test_where_vllm_runs_itself_nothing_changes(found: dict[str, Any], capability: str) -> None:
    before, after = dict(found[capability]["before"]), dict(found[capability]["after"])
    candidates, more = before.pop("candidates"), after.pop("candidates")
    assert more == {**candidates, "latent": [*candidates["latent"], NAME]}
    if capability == "9.0":
        assert before["chosen backend"] == "FlashMLASparseBackend"
    else:  # Its own backends need a real GPU, or packages that are not here.
        assert before.pop("chosen backend").startswith("none")
        after.pop("chosen backend")
    assert before == after


def test_on_sm120_vllms_own_comes_first(found: dict[str, Any]) -> None:
    """It serves fp8 caches only: a bf16 one is left to the backend that comes last."""
    assert found["12.0"]["after"]["chosen backend"] == OURS
    order = found["12.0"]["after"]["candidates"]["latent"]
    assert order.index("FLASHINFER_MLA_SPARSE_SM120") < order.index(NAME) == len(order) - 1


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9"])
def test_on_sm8x_the_hole_is_filled(found: dict[str, Any], capability: str) -> None:
    before, after = found[capability]["before"], found[capability]["after"]
    assert before["chosen backend"].startswith("none")
    assert after["chosen backend"] == OURS
    assert after["replaced operators"] == {"SparseAttnIndexer": REPLACED}
    assert after["indexer's builder"] == "IndexerMetadataBuilder"
    assert set(after["split at"]) - set(before["split at"]) == {"vllm::dsa_indexer_select_indices"}
    changed = {name for name, model in after["models"].items() if model != before["models"][name]}
    assert changed == {"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV32MTPModel"}
    assert not any("vllm.models" in after["models"][name] for name in changed)


@pytest.mark.parametrize(
    ("capability", "fused"), [(80, False), (86, False), (89, True), (90, True)]
)
def test_queries_are_quantised_by_instructions_that_exist(
    monkeypatch: pytest.MonkeyPatch, capability: int, fused: bool
) -> None:
    """vLLM's fused kernel needs those for fp8, which begin with SM89."""
    from vllm.model_executor.models.deepseek_v2 import Indexer

    assert "self.use_fused_indexer_q = (" in inspect.getsource(Indexer.__init__)
    monkeypatch.setattr(Indexer, "use_fused_indexer_q", None, raising=False)
    monkeypatch.setattr(vllm_compat, "_platform", lambda: made_up_gpu(capability))
    vllm_compat.adapt_query_kernels(lambda *_: None)
    indexer = object.__new__(Indexer)
    object.__setattr__(indexer, "use_fused_indexer_q", True)  # as its constructor does
    assert indexer.use_fused_indexer_q is fused


def made_up_gpu(capability: int) -> SimpleNamespace:
    return SimpleNamespace(
        is_cpu=lambda: False,
        is_cuda=lambda: True,
        has_device_capability=lambda wanted: wanted <= capability,
    )


@pytest.mark.parametrize("asked", ["chosen for pages of 16", "chosen for another cache"])
def test_what_the_backend_does_not_serve_vllm_refuses(found: dict[str, Any], asked: str) -> None:
    assert found["8.0"]["after"]["chosen backend"] == OURS
    assert found["8.0"]["after"][asked] == "none: ValueError"


def test_who_asks_gets_the_operator_beside_native_attention(found: dict[str, Any]) -> None:
    after = found["9.0, asked for"]["after"]
    assert after["chosen backend"] == "FlashMLASparseBackend"
    assert after["replaced operators"] == {"SparseAttnIndexer": REPLACED}


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("8.0, too old", "vLLM 0.25.1 was found, 0.26 to 0.33 are supported"),
        ("8.0, only read", "DSA_INDEXER_ALLOW_UNTESTED=1"),
    ],
)
def test_of_another_version_the_plugin_stays_out(
    found: dict[str, Any], case: str, says: str
) -> None:
    assert found[case]["before"] == found[case]["after"]
    # `register` ran twice.
    assert [says in line for line in found[case]["logged"]] == [True, True]


def test_a_version_that_was_only_read_can_be_tried(found: dict[str, Any]) -> None:
    assert found["8.0, only read, allowed"]["after"]["chosen backend"] == OURS


def test_the_backend_is_unpickled_before_plugins_are_loaded() -> None:
    """As a spawned engine core does it with its configuration."""
    program = (
        "import pickle, sys; found = pickle.load(sys.stdin.buffer); print(found.name, "
        "found.get_class().__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(vllm_compat.backend_member()),
        capture_output=True,
        env={**os.environ, **QUIET},
    )
    assert done.stdout.decode().split() == [NAME, OURS], done.stderr.decode()[-2000:]
