"""Every bad plan is refused with field and fix, and the session goes on."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.regions import TensorSpec
from ipc_handoff.wire import host_region
from tests.service.support import (
    K_CACHE_TOKEN,
    Worker,
    refused,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
FAILED = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
MakeWorker = Callable[..., Worker]
pytestmark = pytest.mark.usefixtures("neighbour")


def exact(*lengths: int) -> pb.ExactValues:
    return pb.ExactValues(seq_lens=lengths)


def offsets(*rows: int) -> pb.ExactValues:
    return pb.ExactValues(query_start=rows)


PLAN_CASES: dict[str, tuple[dict[str, Any], grpc.StatusCode, str]] = {
    "an old epoch": ({"epoch": 5}, FAILED, "plan.epoch"),
    "step 0": ({"step": 0}, FAILED, "plan.step"),
    "a step that goes back": ({"step": 1}, FAILED, "plan.step"),
    "more rows than agreed": ({"rows": 9}, EXHAUSTED, "plan.rows"),
    "more requests than agreed": ({"requests": 5, "rows": 5}, EXHAUSTED, "plan.requests"),
    "no rows": ({"rows": 0}, INVALID, "plan.rows"),
    "more decode requests than requests": (
        {"decode_requests": 2, "rows": 2},
        INVALID,
        "plan.decode_requests",
    ),
    "rows that do not add up": ({"rows": 2}, INVALID, "plan.rows"),
    "nine rows a decode request": ({"rows_per_decode": 9}, INVALID, "plan.rows_per_decode"),
    "an unknown layer": ({"layers": [4]}, INVALID, "plan.layers"),
    "no layer": ({"layers": []}, INVALID, "plan.layers"),
    "two layers": ({"layers": [3, 7]}, INVALID, "plan.layers"),
    "lengths beyond the table": ({"max_length": 257}, INVALID, "plan.max_length"),
    "no length": ({"max_length": 0}, INVALID, "plan.max_length"),
    "a negative length": ({"exact": exact(-1)}, INVALID, "plan.exact.seq_lens"),
    "a length over its bound": ({"exact": exact(17)}, INVALID, "plan.exact.seq_lens"),
    "lengths for other requests": ({"exact": exact(1, 1)}, INVALID, "plan.exact.seq_lens"),
    "offsets of other requests": ({"exact": offsets(0, 1, 1)}, INVALID, "plan.exact.query_start"),
    "offsets not from 0": ({"exact": offsets(-1, 1)}, INVALID, "plan.exact.query_start"),
    "offsets beyond the rows": ({"exact": offsets(0, 2)}, INVALID, "plan.exact.query_start"),
    "a decode request of more rows": (
        {"requests": 2, "rows": 3, "exact": offsets(0, 2, 3)},
        INVALID,
        "plan.exact.query_start",
    ),
    "a prefill request of no rows": (
        {"requests": 3, "rows": 3, "exact": offsets(0, 1, 1, 3)},
        INVALID,
        "plan.exact.query_start",
    ),
    "a short trace id": ({"trace": pb.TraceContext(trace_id=b"x")}, INVALID, "plan.trace"),
    "rows of another rank": (
        {"row_range": pb.RowRange(begin=1, end=2)},
        INVALID,
        "plan.row_range",
    ),
}


@pytest.mark.parametrize("case", PLAN_CASES)
def test_select_top_k_with(case: str, worker: Worker) -> None:
    fields, code, field = PLAN_CASES[case]
    assert worker.works()
    with refused(code, field):
        worker.select(worker.plan(**fields))
    assert worker.works()


@pytest.mark.parametrize("field", ["layers", "lengths"])
def test_a_stream_with_a_plan_of_a_million(field: str, worker: Worker) -> None:
    many = [3] * 1_000_000
    fields = {"layers": many} if field == "layers" else {"exact": exact(*many)}
    requests = [pb.RunStepsRequest(session_id=worker.id, plan=worker.plan(**fields))]
    (response,) = worker.stub.RunSteps(iter(requests))
    assert response.report.status == pb.STEP_STATUS_REJECTED
    assert response.report.code == INVALID.value[0]
    assert "1000000 " in response.report.message
    assert worker.works()


def test_a_k_cache_shorter_than_the_plan(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.send_wakeups()
    short = worker.k_cache_of(3)
    short.shape[0] = 1
    worker.send(K_CACHE_TOKEN, worker.k_cache)
    worker.register(*worker.bank_regions(), short)
    with refused(FAILED, "plan.exact.seq_lens", "k_cache/3"):
        worker.select(worker.plan(max_length=33, exact=exact(33)))
    assert worker.works()


def test_a_plan_before_its_layers_k_cache(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.send_wakeups()
    worker.register(*worker.bank_regions())
    with refused(FAILED, "plan.layers", "k_cache/3"):
        worker.select(worker.plan())


def test_a_plan_before_the_bank(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.send_wakeups()
    worker.register(*worker.bank_regions()[:2])
    with refused(FAILED, "regions", "'answers'"):
        worker.select(worker.plan())


def test_a_plan_before_the_eventfds(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.register(*worker.bank_regions(), *worker.k_cache_regions())
    with refused(FAILED, "wakeups"):
        worker.select(worker.plan())
    worker.send_wakeups()
    assert worker.works()


def test_a_plan_after_the_bank_was_given_back(worker: Worker) -> None:
    assert worker.works()
    worker.unregister("staging")
    with refused(FAILED, "plan", "new session"):
        worker.select(worker.plan())
    memory = worker.bank.memories["staging"]
    worker.send(50, memory)
    with refused(FAILED, "staging", "new session"):
        worker.register(host_region("staging", 50, TensorSpec((memory.byte_size,), torch.uint8)))
