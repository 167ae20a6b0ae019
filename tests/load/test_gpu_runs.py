"""Load tests of sessions on a GPU that is none: processes, counts, soaks, reports, documents."""

import importlib
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer_cli.load.console import show
from dsa_indexer_cli.load.host import Host
from dsa_indexer_cli.load.messages import WorkerFactory
from dsa_indexer_cli.load.report import grid, page
from dsa_indexer_cli.load.result import LoadResult
from dsa_indexer_cli.load.run import Progress, run_on
from dsa_indexer_cli.load.summary import summarise
from tests.load import fake_gpu
from tests.load.fake_gpu import FORWARD_NANOSECONDS, LAYER_NANOSECONDS
from tests.load.gpu_workloads import UUID, workload

COUNTED_STEPS, MANY_STEPS = 30, 120


def host_with(make: WorkerFactory) -> Host:
    status = pb.GetStatusResponse(serving=True, gpu_uuid=UUID, version="1")
    return Host("unix:/x", status, make, "Fake GPU")


def load(make: WorkerFactory, steps: int = COUNTED_STEPS, **tables: dict[str, Any]) -> LoadResult:
    """With sessions in processes of their own, until enough steps are counted."""
    wanted, stop = workload(**tables), threading.Event()

    def tell(progress: Progress) -> None:
        if progress.steps >= steps:
            stop.set()

    return summarise(wanted, run_on(host_with(make), wanted, tell, stop))


def failed(result: LoadResult) -> list[str]:
    return [verdict.name for verdict in result.verdicts if not verdict.ok]


@pytest.fixture(scope="module")
def result() -> LoadResult:
    return load(
        fake_gpu.good,
        MANY_STEPS,
        load={"sessions": 2, "reopen_seconds": 0.3},
        soak={"sample_seconds": 0.03},
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


def test_what_goes_wrong_on_a_gpu_fails_a_run() -> None:
    """Answers, layers without a service, and memory: told apart, and nothing else."""
    result = load(fake_gpu.bad, MANY_STEPS, soak={"sample_seconds": 0.03})
    found = {name for name in failed(result) if not name.startswith("soak: s")}
    assert found == {"answers", "inline_share", "soak: GPU 0, gpu_memory_mib"}
    assert "instead of" in result.wrong[0]
    assert 0 < result.inline_layers < result.layers / 3


def test_a_session_that_has_no_room_says_why() -> None:
    result = load(fake_gpu.full)
    assert "sessions" in failed(result)
    assert "model.cache_tokens" in result.failures[0]


def test_who_is_asked_to_end_starts_no_further_session() -> None:
    """Each may tune kernels, for minutes."""
    stop = threading.Event()

    def tell(progress: Progress) -> None:
        if "session 0 gets ready" in progress.doing:
            stop.set()

    wanted = workload(load={"sessions": 2})
    finished = run_on(host_with(fake_gpu.good), wanted, tell, stop)
    assert (len(finished.dones), finished.failures) == (1, [])
