"""vLLM on a CPU: indices from this process, from a service, and from one that dies."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsa_indexer_cli.load.recorded import read_recording, recorded_steps
from dsa_indexer_cli.load.steps import Kind
from dsa_indexer_cli.load.workload import Workload
from tests.support.processes import ServiceProcess
from tests.support.waiting import eventually
from tests.vllm.engines import IN_PROCESS, Engine, answers, prompts
from tests.vllm.tiny_model import INDEXED, TOP_K, write_model

WAIT_BOUND_SECONDS = "20"


@dataclass(frozen=True)
class Variant:
    """Attributes:
    environment, options: of the engine.
    drafting: whether the model has a layer for MTP.
    """

    environment: dict[str, str]
    options: dict[str, Any]
    drafting: bool = False

    @property
    def drafts(self) -> int:
        """Tokens that a decode verifies beside its own."""
        speculative = self.options.get("speculative_config", {})
        drafts: int = speculative.get("num_speculative_tokens", 0)
        return drafts


@dataclass
class Pair:
    """The same engine twice, and what it answers without a service.

    Attributes:
        record: where the one with a service notes its steps.
    """

    variant: Variant
    inline: Engine
    remote: Engine
    service: ServiceProcess
    expected: list[Any]
    record: Path


SPAWNED = Variant({}, {})
NGRAM = Variant(
    IN_PROCESS,
    {
        "kv_cache_dtype": "fp8_ds_mla",
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        },
    },
)
MTP = Variant(
    IN_PROCESS,
    {
        "speculative_config": {
            "method": "mtp",
            "num_speculative_tokens": 2,
            # The second draft attends to what the first has selected.
            "index_share_for_mtp_iteration": True,
        }
    },
    drafting=True,
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SPAWNED, id="spawned, bf16"),
        pytest.param(NGRAM, id="in process, fp8_ds_mla, drafts", marks=pytest.mark.slow),
        pytest.param(MTP, id="in process, MTP", marks=pytest.mark.slow),
    ],
)
def pair(
    request: pytest.FixtureRequest,
    start_service: Callable[[], ServiceProcess],
    start_engine: Callable[..., Engine],
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
) -> Iterator[Pair]:
    variant: Variant = request.param
    environment, options = variant.environment, dict(variant.options)
    record = tmp_path_factory.mktemp("record") / "steps.jsonl"
    if variant.drafting:
        model = tmp_path_factory.mktemp("drafting") / "tiny"
        write_model(model, drafting=True)
    options["model"] = model
    service = start_service()
    inline = start_engine(environment, **options)
    remote = start_engine(
        {
            **environment,
            "DSA_INDEXER_ADDRESS": service.address,
            "DSA_INDEXER_ON_REFUSAL": "error",
            "DSA_INDEXER_WAIT_BOUND_SECONDS": WAIT_BOUND_SECONDS,
            "DSA_INDEXER_RECORD": str(record),
        },
        **options,
    )
    expected = inline.started().generate(prompts())
    yield Pair(variant, inline, remote.started(), service, answers(expected), record)
    inline.close()
    remote.close()


def test_the_plugin_is_what_runs(pair: Pair) -> None:
    for engine in (pair.inline, pair.remote):
        facts = engine.call("facts")
        assert facts["backends"] == ["TRITON_MLA_SPARSE"]
        assert facts["indexer"] == "ServiceIndexer"
        fp8 = pair.variant is NGRAM
        assert facts["cache_dtypes"] == ["torch.uint8" if fp8 else "torch.bfloat16"]
    assert pair.inline.call("statistics") == {}
    # A model that drafts has steps of its own, and they are always inline.
    assert pair.inline.call("facts")["steps"] == 1 + pair.variant.drafting


def test_inline_repeats_over_batches_of_every_kind(pair: Pair) -> None:
    pair.inline.forget()
    pair.inline.call("watch_batches")
    outputs = pair.inline.generate(prompts())
    assert answers(outputs) == pair.expected
    batches = pair.inline.call("batches")
    decode_rows = {count for batch in batches for count in batch["rows"] if count <= 4}
    assert 1 + pair.variant.drafts in decode_rows
    if pair.variant is NGRAM:  # which does not find drafts for all
        assert len(decode_rows) > 2
    for kind, count in {
        "decodes alone": sum(all(rows <= 4 for rows in each["rows"]) for each in batches),
        "decodes beside a prefill": sum(
            0 < each["decodes"] < len(each["rows"]) and max(each["rows"]) > 8 for each in batches
        ),
        "a later part of a prompt": sum(
            rows > 8 and length > rows
            for each in batches
            for rows, length in zip(each["rows"], each["lengths"], strict=True)
        ),
        "more tokens than k": sum(max(each["lengths"]) > TOP_K for each in batches),
        "beginnings that were cached": sum(bool(output["cached"]) for output in outputs),
    }.items():
        assert count, kind


def test_the_service_gives_the_same_bits(pair: Pair) -> None:
    assert answers(pair.remote.generate(prompts())) == pair.expected
    counts = pair.remote.call("statistics")
    assert counts["answered_layers"] == len(INDEXED) * counts["steps"] > 0
    assert counts["inline_layers"] == counts["faulted_rows"] == counts["rejected_steps"] == 0


def test_its_steps_are_recorded_for_load_tests(pair: Pair) -> None:
    # A model that drafts has a session, and a recording, of its own.
    files = [file for file in pair.record.parent.iterdir() if file.read_text().count("\n") > 1]
    found = map(read_recording, sorted(files))
    recording = next(each for each in found if each.geometry.layers == tuple(INDEXED))
    assert recording.geometry.top_k == TOP_K
    assert {shape.layers for shape in recording.shapes} == {tuple(INDEXED)}
    assert {shape.kind for shape in recording.shapes} >= {Kind.DECODE, Kind.MIXED}
    # The load test's own engine of them: every step fits what its session agrees on.
    replay = Workload(**{"load": {"mode": "recorded"}, "replay": {"file": pair.record}})
    steps = recorded_steps(replay, 1)
    for number in range(len(steps.shapes)):
        steps.step(number).inputs.check(steps.geometry)


def test_a_service_that_dies_within_a_step_is_not_noticed(pair: Pair) -> None:
    pair.remote.forget()
    before = pair.remote.call("statistics")
    pair.remote.call("kill_after", pair.service.pid, 5 * len(INDEXED) + 1)
    assert answers(pair.remote.generate(prompts())) == pair.expected
    after = pair.remote.call("statistics")
    assert after["answered_layers"] == before["answered_layers"] + 5 * len(INDEXED) + 1
    assert after["inline_layers"] > len(INDEXED)
    assert after["detachments"] == 1


def test_its_successor_is_taken(pair: Pair, start_service: Callable[[], ServiceProcess]) -> None:
    pair.service.wait()
    start_service()
    assert eventually(lambda: pair.remote.call("statistics")["attachments"] == 2, 60)
    pair.remote.forget()
    before = pair.remote.call("statistics")
    assert answers(pair.remote.generate(prompts())) == pair.expected
    after = pair.remote.call("statistics")
    assert after["answered_layers"] > before["answered_layers"]
    assert after["inline_layers"] == before["inline_layers"]


def test_a_selection_that_is_shifted_by_one_is_seen(pair: Pair) -> None:
    """Otherwise nothing here says anything about the selection."""
    pair.inline.forget()
    pair.inline.call("plant", "shift")
    wrong = answers(pair.inline.generate(prompts()))
    differ = [mine != right for mine, right in zip(wrong, pair.expected, strict=True)]
    assert sum(differ) >= len(differ) - 1, differ
