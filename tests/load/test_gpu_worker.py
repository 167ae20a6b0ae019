"""What a session on a GPU asks of it, without one: sizes of graphs, padding, keys, counts."""

import pytest
import torch

from dsa_indexer_cli.load.gpu_worker import graph_size, layer_times
from dsa_indexer_cli.load.steps import Kind, pages_of
from dsa_indexer_cli.load.worker import NO_TIME
from dsa_indexer_cli.load.workload import WorkloadError
from ipc_handoff.stages import WORKER_STAGES, WorkerStage
from tests.load.fake_gpu import FORWARD_NANOSECONDS, FakeGpu
from tests.load.gpu_workloads import steps_with, worker, workload


def test_a_batch_runs_the_graph_of_the_next_power_of_two() -> None:
    geometry = workload().geometry  # 6 decodes of 2 rows, 1 prefill of 5: 17 rows, 7 requests
    sizes = [graph_size(Kind.DECODE, requests, 2, geometry) for requests in range(1, 7)]
    assert sizes == [(1, 2), (2, 2), (4, 2), (4, 2), (7, 2), (7, 2)]
    assert graph_size(Kind.DECODE, 5, 3, geometry) == (5, 3)  # 7 requests of it have no room
    assert graph_size(Kind.MIXED, 5, 2, geometry) is None
    assert graph_size(Kind.PREFILL, 1, 0, geometry) is None


def test_graphs_are_made_for_the_steps_that_come_and_for_no_other() -> None:
    gpu = FakeGpu()
    made = worker(gpu, steps={"batch": {"kind": "choice", "values": [1, 3]}})
    assert sorted(made._graphs) == [(1, 2), (4, 2)]
    assert gpu.captured == 2


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
