"""Sessions on a GPU, without one: sizes of graphs, what is asked of a session, what is counted."""

import importlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer_cli.gpu_facts import Gpu, GpuFacts
from dsa_indexer_cli.load import host as load_host
from dsa_indexer_cli.load.answers import contradiction, exact_scores, first_difference
from dsa_indexer_cli.load.console import show
from dsa_indexer_cli.load.gpu_worker import GpuWorker, graph_size, layer_times
from dsa_indexer_cli.load.host import Host, host_of
from dsa_indexer_cli.load.host_worker import HostWorker
from dsa_indexer_cli.load.messages import Order, WorkerFactory
from dsa_indexer_cli.load.report import grid, page
from dsa_indexer_cli.load.result import LoadResult
from dsa_indexer_cli.load.run import Progress, run_on
from dsa_indexer_cli.load.steps import PlannedStep, pages_of
from dsa_indexer_cli.load.summary import summarise
from dsa_indexer_cli.load.worker import NO_TIME
from dsa_indexer_cli.load.workload import Load, Workload, WorkloadError
from indexer_client import StepInputs
from ipc_handoff.stages import WORKER_STAGES, WorkerStage
from tests.load import fake_gpu
from tests.load.fake_gpu import FORWARD_NANOSECONDS, LAYER_NANOSECONDS, FakeGpu

WORKLOAD: dict[str, Any] = {
    "name": "small",
    "model": {"layers": 3, "heads": 16, "top_k": 16, "page_size": 32},
    "load": {"seconds": 200, "warm_up_seconds": 0.05, "placement": "mps"},
    "steps": {
        "batch": {"kind": "uniform", "low": 1, "high": 6},
        "context": {"kind": "uniform", "low": 8, "high": 90},
        "prefill_rows": {"kind": "fixed", "value": 5},
        "rows_per_decode": 2,
        "mix": {"decode": 4, "mixed": 1, "prefill": 1},
    },
    "check": {"share": 1.0},
}
UUID = "GPU-1"
COUNTED_STEPS, MANY_STEPS = 30, 160


def workload(**tables: dict[str, Any]) -> Workload:
    return Workload(**{**WORKLOAD, **{k: {**WORKLOAD.get(k, {}), **v} for k, v in tables.items()}})


def worker(gpu: FakeGpu, **tables: dict[str, Any]) -> GpuWorker:
    made = GpuWorker(Order(0, "unix:/x", workload(**tables), fake_gpu.good, UUID), gpu)
    made.open(lambda _: None)
    return made


def load(make: WorkerFactory, steps: int = COUNTED_STEPS, **tables: dict[str, Any]) -> LoadResult:
    """With sessions in processes of their own, until enough steps are counted."""
    status = pb.GetStatusResponse(serving=True, gpu_uuid=UUID, version="1")
    host = Host("unix:/x", status, make, "Fake GPU")
    wanted, stop = workload(**tables), threading.Event()

    def tell(progress: Progress) -> None:
        if progress.steps >= steps:
            stop.set()

    return summarise(wanted, run_on(host, wanted, tell, stop))


def failed(result: LoadResult) -> list[str]:
    return [verdict.name for verdict in result.verdicts if not verdict.ok]


def decodes(requests: int, rows_per_decode: int = 1) -> StepInputs:
    return StepInputs(
        query_start=torch.arange(0, requests + 1, dtype=torch.int32) * rows_per_decode,
        seq_lens=torch.full((requests,), 40, dtype=torch.int32),
        block_table=torch.zeros((requests, 2), dtype=torch.int32),
        rows=requests * rows_per_decode,
        decode_requests=requests,
        rows_per_decode=rows_per_decode,
        max_length=40,
    )


def test_a_batch_runs_the_graph_of_the_next_power_of_two() -> None:
    geometry = workload().geometry  # 6 decodes of 2 rows, 1 prefill of 5: 17 rows, 7 requests
    sizes = [graph_size(decodes(n, 2), geometry) for n in range(1, 7)]
    assert sizes == [(1, 2), (2, 2), (4, 2), (4, 2), (7, 2), (7, 2)]
    full = decodes(5, 3)  # 8 requests of it have no room
    assert graph_size(full, geometry) == (5, 3)
    mixed = StepInputs(**{**vars(full), "decode_requests": 4})
    assert graph_size(mixed, geometry) is None


def test_graphs_are_made_for_the_steps_that_come_and_for_no_other() -> None:
    gpu = FakeGpu()
    made = worker(gpu, steps={"batch": {"kind": "choice", "values": [1, 3]}})
    assert sorted(made._graphs) == [(1, 2), (4, 2)]
    assert gpu.captured == 2


def steps_with(made: GpuWorker, wanted: Callable[[PlannedStep], bool]) -> int:
    return next(number for number, step in enumerate(made.steps.all) if wanted(step))


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["decode", "mixed", "prefill"])
def test_steps_of_every_kind_are_run_and_compared(kind: int) -> None:
    made = worker(FakeGpu())
    for layer in made.steps.geometry.layers:
        number = steps_with(made, lambda step: step.kind == kind)
        ran = made.run(number, made.steps.step(number), layer)
        assert ran.check is not None and made.compare(ran.check) == ""
        assert ran.forward == FORWARD_NANOSECONDS
        assert ran.ended > ran.began


def test_a_padded_batch_selects_nothing_behind_its_rows() -> None:
    made = worker(FakeGpu())
    number = steps_with(made, lambda step: step.kind == 0 and step.inputs.requests == 3)
    ran = made.run(number, made.steps.step(number), 1)
    assert ran.check is not None
    assert ran.check.answer.shape == (8, 16)
    assert made.compare(ran.check) == ""
    ran.check.answer[7, 0] = 3
    assert "behind the step's 6" in made.compare(ran.check)


def test_an_answer_of_another_step_or_layer_is_a_wrong_one() -> None:
    made = worker(FakeGpu())
    checks = []
    for number in range(6):
        planned = made.steps.step(number)
        for layer in made.steps.geometry.layers:
            check = made.run(number, planned, layer).check
            assert check is not None
            checks.append(check)
    answers = {check.answer.numpy().tobytes() for check in checks}
    assert len(answers) == len(checks)


def test_layers_that_the_service_did_not_answer_are_counted_once() -> None:
    made = worker(FakeGpu(is_forgetful=True))
    for number in range(10):
        made.run(number, made.steps.step(number), None)
    assert made.inline_since() == 2
    assert made.inline_since() == 0


def test_a_session_that_is_opened_anew_has_new_graphs_and_the_same_keys() -> None:
    gpu = FakeGpu()
    made = worker(gpu)
    before = {layer: cache.clone() for layer, cache in made._caches.items()}
    captured = gpu.captured
    made.run(0, made.steps.step(0), None)
    made.close()
    made.open(lambda _: None)
    assert gpu.captured == 2 * captured and len(gpu.indexers) == 2
    assert all(torch.equal(before[layer], cache) for layer, cache in made._caches.items())
    assert not torch.equal(before[0], before[1])
    made.run(1, made.steps.step(1), None)
    assert made.inline_since() == 0


def test_a_replica_gets_its_keys_each_time() -> None:
    """It is the new session's own."""
    made = worker(FakeGpu(), load={"placement": "peer_gpu"})
    before = made._caches[0].clone()
    made.close()
    made._caches[0].zero_()
    made.open(lambda _: None)
    assert torch.equal(made._caches[0], before)


def test_without_a_service_nobody_is_waited_for() -> None:
    made = worker(FakeGpu(), load={"placement": "inline"})
    made.run(0, made.steps.step(0), None)
    assert made.inline_since() == 3


def test_caches_that_do_not_fit_are_refused_before_anything_is_made() -> None:
    with pytest.raises(WorkloadError, match=r"model\.cache_tokens: 3 K caches .*\(fix: fewer"):
        worker(FakeGpu(free_bytes=1 << 30))


def test_requests_share_pages_only_where_there_are_too_few() -> None:
    geometry = workload().geometry
    assert pages_of(geometry, 0, on_gpu=True) == geometry.max_requests * geometry.table_width
    assert pages_of(geometry, 0, on_gpu=False) == geometry.table_width + 61
    assert pages_of(geometry, 200, on_gpu=True) == 7
    assert pages_of(geometry, 1, on_gpu=True) == geometry.table_width
    for tokens, shared in ((0, False), (100, True)):
        made = worker(FakeGpu(), model={"cache_tokens": tokens})
        number = steps_with(made, lambda step: step.inputs.requests > 4)
        table = made.steps.step(number).inputs.block_table
        assert (len(table.unique()) < table.numel()) == shared
        assert all(len(row.unique()) == len(row) for row in table)


def test_times_of_layers_go_from_staging_to_staging() -> None:
    rows = [[0] * len(WORKER_STAGES) for _ in range(3)]
    for row, begun in zip(rows, (100, 130, 170), strict=True):
        row[WorkerStage.STAGE_BEGUN] = begun
    rows[-1][WorkerStage.HANDED_BACK] = 250
    assert layer_times(rows) == [30, 40, 80]
    rows[1][WorkerStage.STAGE_BEGUN] = 0  # not reached
    assert layer_times(rows) == [NO_TIME, NO_TIME, 80]


# Against exact scores.


def test_what_contradicts_exact_scores_is_named() -> None:
    made = worker(FakeGpu())
    number = steps_with(made, lambda step: step.kind == 1 and step.inputs.rows > 8)
    planned = made.steps.step(number)
    check = made.run(number, planned, 1).check
    assert check is not None
    said = set()
    for row in range(planned.inputs.rows):
        scores = exact_scores(row, *check.query, made._caches[1], check.inputs)
        answer = check.answer[row]
        assert contradiction(answer, scores) == ""
        if len(scores) <= len(answer) + 1:
            continue
        worst = int(scores.argmin())
        missing, twice, beyond = answer.clone(), answer.clone(), answer.clone()
        missing[-1], twice[0], beyond[-1] = worst, answer[1], len(scores)
        said |= {contradiction(bad, scores).split()[0] for bad in (missing, twice, beyond)}
        few = torch.full_like(answer, -1)
        few[: len(answer) - 1] = answer[:-1]
        assert contradiction(few, scores).startswith("chosen -1")
    assert said == {"key", "a", "chosen"}


def test_a_better_key_that_is_not_chosen_is_found_beside_equal_ones() -> None:
    """Enough keys are near the k-th score, so that each chosen one is good enough."""
    scores = torch.ones(20)
    scores[7] = 5.0
    answer = torch.arange(8, 12, dtype=torch.int32)
    assert "key 7 is not chosen" in contradiction(answer, scores)
    answer[0] = 7
    assert contradiction(answer, scores) == ""


def test_fewer_keys_than_k_are_all_chosen() -> None:
    scores = torch.tensor([3.0, 1.0])
    assert contradiction(torch.tensor([0, 1, -1], dtype=torch.int32), scores) == ""
    assert contradiction(torch.tensor([0, 1, 1], dtype=torch.int32), scores) != ""


def test_the_first_difference_of_two_answers() -> None:
    expected = torch.arange(6, dtype=torch.int32).view(2, 3)
    assert first_difference(expected.clone(), expected) == ""
    other = expected.clone()
    other[1, 2] += 1
    assert first_difference(other, expected).startswith("rows [1]: [3, 4, 6]")


# Whole runs.


@pytest.fixture(scope="module")
def result() -> LoadResult:
    return load(
        fake_gpu.good,
        MANY_STEPS,
        load={"sessions": 2, "reopen_seconds": 0.3},
        soak={"sample_seconds": 0.05},
    )


def test_a_run_on_a_gpu_is_counted_and_compared(result: LoadResult) -> None:
    assert not result.failures and result.steps > 0, result.verdicts
    assert (result.service.gpu, result.service.placement) == ("Fake GPU", "mps")
    assert "a fake" in result.service.reasons[0]
    assert result.layers == 3 * result.steps and result.inline_layers == 0
    assert result.checked > 0 == result.wrong_answers and result.reopened > 0
    assert result.forward.count == result.steps
    assert result.forward.p50 == pytest.approx(FORWARD_NANOSECONDS / 1e6, rel=0.01)
    assert 0 < result.layer.count <= result.layers
    assert result.layer.p50 == pytest.approx(LAYER_NANOSECONDS / 1e6, rel=0.01)
    assert all(shape.forward.count == shape.steps for shape in result.shapes)


def test_a_report_of_a_gpu_speaks_of_its_times(result: LoadResult) -> None:
    text = page(result)
    assert "Fake GPU, placement mps" in text
    assert "50.0 µs" in text and "7.00 µs" in text and "a layer</th>" in text
    assert "GPU, MiB" in text
    assert text.count("background: rgba(") == sum(len(row) for row in grid(result).values()) > 3
    show(result, None)


def test_layers_by_batch_and_context_are_a_table_where_both_differ(result: LoadResult) -> None:
    cells = grid(result)
    assert list(cells) == sorted(cells)
    decodes = [shape for shape in result.shapes if shape.kind == "decode"]
    assert sum(map(len, cells.values())) == len(decodes)
    one = decodes[-1]
    assert cells[one.requests][one.context].milliseconds == one.layer.p50
    assert all(0 < cell.shade < 1 for row in cells.values() for cell in row.values())
    alone = replace(result, shapes=[s for s in result.shapes if s.requests == one.requests])
    assert grid(alone) == {}


def test_results_of_a_gpu_are_put_into_the_docs(
    result: LoadResult, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    programs = [importlib.import_module(name) for name in ("load_runs", "load_documents")]
    kept, documents = programs[0].record_of(result), programs[1]
    about = {"device": "Fake GPU", "date": "2030-01-01", "versions": {"torch": "9"}}
    soak = tmp_path / "soak.json"
    soak.write_text(json.dumps({**about, "results": kept}))
    run = tmp_path / "run.json"
    kept["workload"].pop("soak")
    run.write_text(json.dumps({**about, "results": kept}))
    document = tmp_path / "load.md"
    marks = [f"<!-- {name}: begin -->\n<!-- {name}: end -->" for name in ("soaks", "gpu-runs")]
    document.write_text("\n".join(marks))
    monkeypatch.setattr(documents, "LOAD", document)
    documents.document([soak, run])
    text = document.read_text()
    assert "| GPU 0 | gpu memory, MiB | 1000.0 | 1000.0 | 64 |" in text
    assert "| decode |" in text and "| 16.7 | 7.0 | 7.0 |" in text


def test_a_wrong_answer_on_a_gpu_fails_a_run() -> None:
    result = load(fake_gpu.wrong)
    assert failed(result) == ["answers"]
    assert "instead of" in result.wrong[0]


def test_layers_without_a_service_on_a_gpu_fail_a_run() -> None:
    result = load(fake_gpu.forgetful)
    assert failed(result) == ["inline_share"]
    assert 0 < result.inline_layers < result.layers / 3


def test_memory_of_a_gpu_that_grows_fails_a_soak() -> None:
    result = load(fake_gpu.growing, MANY_STEPS, soak={"sample_seconds": 0.05})
    grown = {name for name in failed(result) if "GPU" in name}
    assert grown == {"soak: GPU 0, gpu_memory_mib"}


def test_a_session_that_has_no_room_says_why() -> None:
    result = load(fake_gpu.full)
    assert "sessions" in failed(result)
    assert "model.cache_tokens" in result.failures[0]


# Where it runs.


def facts(count: int) -> GpuFacts:
    """GPUs that all reach each other, without MPS."""
    ordinals = range(count)
    return GpuFacts(
        (13, 0),
        tuple(
            Gpu(n, f"GPU-{n}", f"Fake GPU {n}", (9, 0), 1 << 37, False,
                tuple(other for other in ordinals if other != n))
            for n in ordinals
        ),
    )  # fmt: skip


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that reach each other, without MPS."""
    monkeypatch.setattr(load_host, "may_have_gpus", lambda: True)
    monkeypatch.setattr(load_host, "look", lambda: facts(2))
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Devices of services that were started, and the MPS daemon that they saw."""
    found: list[tuple[str, str | None]] = []

    class Service:
        def __init__(self, address: str, traces: None, log: Path, *, device: str) -> None:
            found.append((device, os.environ.get("CUDA_MPS_PIPE_DIRECTORY")))

        def start(self, seconds: float) -> None: ...
        def stop(self) -> int:
            return 0

        def kill(self) -> None: ...

    class Daemon:
        def __init__(self, folder: Path) -> None:
            self.variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}

        def __enter__(self) -> dict[str, str]:
            return self.variables

        def __exit__(self, *_: object) -> None: ...

    status = pb.GetStatusResponse(serving=True, gpu_uuid=UUID)
    monkeypatch.setattr(load_host, "ServiceProcess", Service)
    monkeypatch.setattr(load_host, "mps_daemon", Daemon)
    monkeypatch.setattr(load_host, "status_of", lambda address: status)
    return found


@pytest.mark.parametrize(
    ("placement", "device", "own_daemon"),
    [
        ("auto", "cuda:0", False),
        ("timeslice", "cuda:0", False),
        ("mps", "cuda:0", True),
        ("peer_gpu", "cuda:1", False),
        ("cpu", "cpu", False),
    ],
)
def test_a_service_of_its_own_is_where_the_placement_wants_it(
    placement: Any, device: str, own_daemon: bool, gpus: None,
    started: list[tuple[str, str | None]],
) -> None:  # fmt: skip
    with host_of(Load(placement=placement), None, lambda _: None) as host:
        assert host.make_worker is (HostWorker if device == "cpu" else load_host.on_gpu)
        assert bool(host.environment) == own_daemon
        assert host.gpu == ("" if device == "cpu" else "Fake GPU 0")
    ((found, daemon),) = started
    assert found == device
    assert (daemon is not None) == own_daemon


def test_without_a_service_it_is_the_gpu_alone(gpus: None) -> None:
    with host_of(Load(placement="inline"), "unix:/x", lambda _: None) as host:
        assert (host.address, host.gpu) == ("", "Fake GPU 0")


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ({"placement": "mps", "device": 2}, r"load\.device: 2, and 2 GPUs are visible \(fix: "),
        ({"device": 5}, r"load\.device: 5"),
    ],
    ids=["asked", "auto"],
)
def test_a_gpu_that_is_not_there(load: dict[str, Any], said: str, gpus: None) -> None:
    with pytest.raises(WorkloadError, match=said), host_of(Load(**load), None, lambda _: None):
        pass


def test_a_peer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_host, "may_have_gpus", lambda: True)
    monkeypatch.setattr(load_host, "look", lambda: facts(1))
    with (
        pytest.raises(RuntimeError, match=r"load\.placement: peer_gpu, but no GPU .*\(fix: "),
        host_of(Load(placement="peer_gpu"), None, lambda _: None),
    ):
        pass


@pytest.mark.parametrize("placement", ["mps", "peer_gpu", "timeslice"])
def test_a_placement_that_a_machine_without_a_gpu_cannot_have(placement: Any) -> None:
    with (
        pytest.raises(RuntimeError, match=r"load\.placement: needs a GPU: "),
        host_of(Load(placement=placement), None, lambda _: None),
    ):
        pass


@pytest.mark.parametrize(
    ("uuid", "placement", "said"),
    [
        ("", "mps", r"load\.placement: mps, but the service .* is on the CPU \(fix: "),
        (UUID, "cpu", r"load\.placement: cpu, but the service .* is on a GPU \(fix: "),
    ],
)
def test_a_running_service_that_is_elsewhere(
    uuid: str, placement: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = pb.GetStatusResponse(serving=True, gpu_uuid=uuid)
    monkeypatch.setattr(load_host, "status_of", lambda address: status)
    with (
        pytest.raises(RuntimeError, match=said),
        host_of(Load(placement=placement), "unix:/x", lambda _: None),
    ):
        pass
