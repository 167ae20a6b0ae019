"""Every bad input gets its code and a message with field and fix; others work on afterwards."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.layout import LAYOUT_VERSION
from ipc_handoff.regions import HostMemory, TensorSpec
from ipc_handoff.wire import geometry_message, host_region, layout_message
from tests.service.support import (
    GEOMETRY,
    K_CACHE_TOKEN,
    LocalService,
    Worker,
    open_request,
    refused,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
FAILED = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXISTS = grpc.StatusCode.ALREADY_EXISTS
MakeWorker = Callable[..., Worker]


@pytest.fixture(autouse=True)
def neighbour(make_worker: MakeWorker) -> Iterator[Worker]:
    """A session that must not notice."""
    worker = make_worker().attach()
    yield worker
    assert worker.works()


def geometry(**fields: Any) -> dict[str, Any]:
    message = geometry_message(GEOMETRY)
    for name, value in fields.items():
        if name == "layers":
            del message.layers[:]
            message.layers.extend(value)
        else:
            setattr(message, name, value)
    return {"geometry": message}


def layout(**fields: Any) -> dict[str, Any]:
    message = layout_message(GEOMETRY)
    for name, value in fields.items():
        setattr(message, name, value)
    return {"layout": message}


def identity(**fields: Any) -> dict[str, Any]:
    return {"worker": pb.Worker(**({"instance": "x"} | fields))}


OPEN_CASES: dict[str, tuple[dict[str, Any], grpc.StatusCode, str]] = {
    "no worker": ({"worker": None}, INVALID, "worker.instance"),
    "instance too long": (identity(instance="x" * 129), INVALID, "worker.instance"),
    "engine's name too long": (identity(engine="x" * 129), INVALID, "worker.engine"),
    "unknown model": (identity(model="third"), INVALID, "worker.model"),
    "worker on a GPU": (identity(gpu_uuid="GPU-1"), FAILED, "worker.gpu_uuid"),
    "group without a name": (identity(group=pb.Group(size=1)), INVALID, "worker.group.name"),
    "group of none": (identity(group=pb.Group(name="g")), INVALID, "worker.group.size"),
    "group too large": (
        identity(group=pb.Group(name="g", size=2**32 - 1)),
        INVALID,
        "worker.group.size",
    ),
    "rank beyond the group": (
        identity(group=pb.Group(name="g", rank=2, size=2)),
        INVALID,
        "worker.group.rank",
    ),
    "no geometry": ({"geometry": None}, INVALID, "geometry"),
    "no layers": (geometry(layers=[]), INVALID, "geometry.layers"),
    "layers not ascending": (geometry(layers=[7, 3]), INVALID, "geometry.layers"),
    "a layer twice": (geometry(layers=[3, 3]), INVALID, "geometry.layers"),
    "too many layers": (geometry(layers=range(1025)), INVALID, "geometry.layers"),
    "wrong H": (geometry(heads=48), INVALID, "geometry.heads"),
    "wrong head dim": (geometry(head_dim=64), INVALID, "geometry.head_dim"),
    "k of 0": (geometry(top_k=0), INVALID, "geometry.top_k"),
    "k too large": (geometry(top_k=4097), INVALID, "geometry.top_k"),
    "wrong page size": (geometry(page_size=16), INVALID, "geometry.page_size"),
    "unknown K cache layout": (geometry(k_cache_layout=9), INVALID, "geometry.k_cache_layout"),
    "no rows": (geometry(max_rows=0), INVALID, "geometry.max_rows"),
    "no requests": (geometry(max_requests=0), INVALID, "geometry.max_requests"),
    "no context": (geometry(max_context=0), INVALID, "geometry.max_context"),
    "context beyond int32": (geometry(max_context=2**31), INVALID, "geometry.max_context"),
    "banks too large": (
        geometry(max_rows=2**32 - 1, max_requests=2**32 - 1, max_context=2**31 - 1),
        EXHAUSTED,
        "geometry",
    ),
    "no layout": ({"layout": None}, INVALID, "layout"),
    "another layout version": (layout(version=LAYOUT_VERSION + 1), FAILED, "layout.version"),
    "another fingerprint": (layout(fingerprint=1), FAILED, "layout.fingerprint"),
    "fingerprint of another geometry": (geometry(max_rows=4), FAILED, "layout.fingerprint"),
    "no slots": (layout(slots=0), INVALID, "layout.slots"),
    "too many slots": (layout(slots=2**32 - 1), INVALID, "layout.slots"),
    "unknown placement": ({"placement": 77}, INVALID, "placement"),
    "placement on a GPU": ({"placement": pb.PLACEMENT_MPS}, FAILED, "placement"),
    "unknown signalling": ({"signalling": 77}, INVALID, "signalling"),
    "another engine": ({"engine": "triton"}, FAILED, "engine"),
    "another configuration": (
        {"required_configuration_hash": "0" * 64},
        FAILED,
        "required_configuration_hash",
    ),
}


@pytest.mark.parametrize("case", OPEN_CASES)
def test_open_session_with(case: str, service: LocalService) -> None:
    fields, code, field = OPEN_CASES[case]
    before = len(service.status().sessions)
    with refused(code, field):
        service.stub().OpenSession(open_request(**fields))
    assert len(service.status().sessions) == before


RegionChange = Callable[[pb.Region], None]


def region(name: str, /, **fields: Any) -> tuple[str, RegionChange]:
    """The region called `name`, with some fields replaced."""

    def change(region: pb.Region) -> None:
        for field, value in fields.items():
            if field in ("shape", "strides"):
                del getattr(region, field)[:]
                getattr(region, field).extend(value)
            elif field in ("token", "offset"):
                setattr(region.host, field, value)
            elif field == "cuda_ipc":
                region.cuda_ipc.CopyFrom(value)
            elif field == "memory":
                region.ClearField("host")
            else:
                setattr(region, field, value)

    return name, change


PAGE_BYTES = 32 * 132
ANSWERS_BYTES = GEOMETRY.answers.size
K3 = "k_cache/3"
REGION_CASES: dict[str, tuple[tuple[str, RegionChange], grpc.StatusCode, str]] = {
    "unknown name": (region("control", name="spare"), INVALID, "regions[0].name"),
    "empty name": (region("control", name=""), INVALID, "regions[0].name"),
    "unknown layer": (region(K3, name="k_cache/4"), INVALID, "regions[3].name"),
    "layer that is no number": (region(K3, name="k_cache/03"), INVALID, "regions[3].name"),
    "no memory": (region(K3, memory=None), INVALID, f"{K3}.memory"),
    "memory of a GPU": (region(K3, cuda_ipc=pb.CudaIpcMemory()), FAILED, f"{K3}.cuda_ipc"),
    "no data type": (region("answers", data_type=0), INVALID, "answers.data_type"),
    "unknown data type": (region("answers", data_type=99), INVALID, "answers.data_type"),
    "dtype of a bank": (region("answers", data_type=2), INVALID, "answers.data_type"),
    "dtype of a K cache": (region(K3, data_type=7), INVALID, f"{K3}.data_type"),
    "no shape": (region("answers", shape=[]), INVALID, "answers.shape"),
    "dimension of 0": (region("answers", shape=[0]), INVALID, "answers.shape"),
    "negative dimension": (region("answers", shape=[-5]), INVALID, "answers.shape"),
    "bank of two dimensions": (region("answers", shape=[2, 2048]), INVALID, "answers.shape"),
    "bank with holes": (region("answers", strides=[2]), INVALID, "answers.shape"),
    "bank below the layout": (
        region("answers", shape=[ANSWERS_BYTES - 1]),
        INVALID,
        "answers.shape",
    ),
    "too short for its shape": (
        region("answers", byte_size=ANSWERS_BYTES - 1),
        INVALID,
        "answers.byte_size",
    ),
    "beyond its memory": (region("answers", byte_size=1 << 40), INVALID, "answers.byte_size"),
    "size of 0": (region("answers", byte_size=0), INVALID, "answers.byte_size"),
    "offset beyond its memory": (
        region("answers", offset=(1 << 64) - 64),
        INVALID,
        "answers.byte_size",
    ),
    "offset off a cache line": (region("staging", offset=4), INVALID, "staging.host.offset"),
    "K cache off its scales": (region(K3, offset=2), INVALID, f"{K3}.host.offset"),
    "page size of a K cache": (region(K3, shape=[4, 64, 132]), INVALID, f"{K3}.shape"),
    "head dim of a K cache": (region(K3, shape=[8, 32, 68]), INVALID, f"{K3}.shape"),
    "K cache of two dimensions": (region(K3, shape=[256, 132]), INVALID, f"{K3}.shape"),
    "K cache of 2**62 pages": (region(K3, shape=[2**62, 32, 132]), INVALID, f"{K3}.shape"),
    "strides of another rank": (region(K3, strides=[132, 1]), INVALID, f"{K3}.strides"),
    "negative strides": (region(K3, strides=[-PAGE_BYTES, 132, 1]), INVALID, f"{K3}.strides"),
    "tokens not dense": (region(K3, strides=[2 * PAGE_BYTES, 264, 1]), INVALID, f"{K3}.strides"),
    "bytes not dense": (region(K3, strides=[2 * PAGE_BYTES, 132, 2]), INVALID, f"{K3}.strides"),
    "pages that overlap": (region(K3, strides=[0, 132, 1]), INVALID, f"{K3}.strides"),
    "pages off the scales": (
        region(K3, strides=[PAGE_BYTES + 2, 132, 1]),
        INVALID,
        f"{K3}.strides",
    ),
    "token never sent": (region(K3, token=4711), FAILED, f"{K3}.host.token"),
    "token of an eventfd": (region(K3, token=1), FAILED, f"{K3}.host.token"),
}


@pytest.mark.parametrize("case", REGION_CASES)
def test_register_regions_with(case: str, make_worker: MakeWorker, service: LocalService) -> None:
    (name, change), code, field = REGION_CASES[case]
    worker = make_worker()
    before = service.status().mapped_bytes
    regions = [*worker.bank_regions(), *worker.k_cache_regions()]
    change(next(r for r in regions if r.name == name))
    with refused(code, field):
        worker.register(*regions)
    assert service.status().mapped_bytes == before
    # The session itself is unharmed: everything is sent again and works.
    assert worker.attach().works()


def test_register_no_regions(make_worker: MakeWorker) -> None:
    with refused(INVALID, "regions", "empty"):
        make_worker().register()


def test_register_a_region_twice(worker: Worker) -> None:
    with refused(EXISTS, "k_cache/3"):
        worker.register(*worker.k_cache_regions(token=K_CACHE_TOKEN + 1))
    assert worker.works()


def test_register_a_region_twice_in_one_call(make_worker: MakeWorker) -> None:
    worker = make_worker()
    regions = worker.k_cache_regions()
    with refused(EXISTS, "k_cache/3"):
        worker.register(*regions, regions[0])
    assert not worker.service.status().sessions[-1].regions


def test_register_memory_of_another_session(make_worker: MakeWorker) -> None:
    owner, other = make_worker(), make_worker()
    regions = owner.k_cache_regions()
    with refused(FAILED, "k_cache/3.host.token"):
        other.register(*regions)
    assert owner.register(*regions)


def test_register_a_control_block_of_another_epoch(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.bank.control.start(worker.epoch - 1)
    with refused(FAILED, "control", str(worker.epoch)):
        worker.register(*worker.bank_regions())


def test_register_a_file_that_can_shrink(make_worker: MakeWorker) -> None:
    worker = make_worker()
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, ANSWERS_BYTES)
    worker.connection.send(99, descriptor)
    os.close(descriptor)
    spec = TensorSpec((ANSWERS_BYTES,), torch.uint8)
    with refused(INVALID, "host", "sealed"):
        worker.register(host_region("answers", 99, spec))


def test_register_something_that_is_no_eventfd_as_one(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.send(1, worker.k_cache)
    with refused(INVALID, "wakeup", "eventfd"):
        worker.register(*worker.bank_regions())
    assert worker.attach().works()


def test_unregister_no_regions(worker: Worker) -> None:
    with refused(INVALID, "names", "empty"):
        worker.unregister()


def test_unregister_an_unknown_region(worker: Worker) -> None:
    with refused(NOT_FOUND, "names", "k_cache/9"):
        worker.unregister("k_cache/3", "k_cache/9")
    assert worker.works()


def test_unregister_a_region_twice(worker: Worker) -> None:
    worker.unregister("k_cache/7")
    with refused(NOT_FOUND, "names", "k_cache/7"):
        worker.unregister("k_cache/7")
    assert worker.works()


def test_unregister_a_region_twice_in_one_call(worker: Worker) -> None:
    with refused(INVALID, "names", "twice"):
        worker.unregister("k_cache/7", "k_cache/7")


def test_unregister_a_name_of_megabytes(worker: Worker) -> None:
    with refused(INVALID, "names[0]"):
        worker.unregister("\N{SNOWMAN}" * 1_000_000)


def exact(*lengths: int) -> pb.ExactValues:
    return pb.ExactValues(seq_lens=lengths)


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


UNKNOWN_SESSION: dict[str, Callable[[Any], Any]] = {
    "RegisterRegions": lambda stub: stub.RegisterRegions(pb.RegisterRegionsRequest()),
    "UnregisterRegions": lambda stub: stub.UnregisterRegions(pb.UnregisterRegionsRequest()),
    "KeepAlive": lambda stub: stub.KeepAlive(pb.KeepAliveRequest(session_id="nobody")),
    "CloseSession": lambda stub: stub.CloseSession(pb.CloseSessionRequest(session_id="nobody")),
    "SelectTopK": lambda stub: stub.SelectTopK(pb.SelectTopKRequest(plan=pb.StepPlan())),
    "RunSteps": lambda stub: list(stub.RunSteps(iter([pb.RunStepsRequest(plan=pb.StepPlan())]))),
}


@pytest.mark.parametrize("call", UNKNOWN_SESSION)
def test_an_unknown_session_in(call: str, service: LocalService) -> None:
    with refused(NOT_FOUND, "session_id"):
        UNKNOWN_SESSION[call](service.stub())


def test_a_session_is_closed_twice(worker: Worker) -> None:
    worker.close()
    with refused(NOT_FOUND, "session_id", "closed"):
        worker.close()


def test_a_message_over_the_limit(service: LocalService) -> None:
    request = open_request(engine="x" * (5 << 20))
    with pytest.raises(grpc.RpcError) as caught:
        service.stub().OpenSession(request)
    assert caught.value.code() == EXHAUSTED
    assert "larger than max" in caught.value.details()


def test_a_message_over_the_limit_in_a_stream(worker: Worker) -> None:
    plan = worker.plan(exact=pb.ExactValues(seq_lens=[2**31 - 1] * (1 << 20)))
    with pytest.raises(grpc.RpcError) as caught:
        list(worker.stub.RunSteps(iter([pb.RunStepsRequest(session_id=worker.id, plan=plan)])))
    assert caught.value.code() == EXHAUSTED
    assert worker.works()


@pytest.mark.parametrize("call", ["OpenSession", "RegisterRegions", "GetStatus"])
def test_bytes_that_are_no_message_in(call: str, service: LocalService) -> None:
    method = service.channel().unary_unary(f"/dsa_indexer.v1.IndexerService/{call}")
    with refused(INVALID, "message", "parsed"):
        method(b"\x0a\xff\xff\xff")


def test_bytes_that_are_no_message_in_a_stream(service: LocalService) -> None:
    method = service.channel().stream_stream("/dsa_indexer.v1.IndexerService/RunSteps")
    with refused(INVALID, "message", "parsed"):
        list(method(iter([b"\xff"])))


def test_an_unknown_call(service: LocalService) -> None:
    method = service.channel().unary_unary("/dsa_indexer.v1.IndexerService/Nothing")
    with pytest.raises(grpc.RpcError) as caught:
        method(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_memory_without_bytes_to_write(make_worker: MakeWorker) -> None:
    """Memory sealed against writing cannot hold answers."""
    import fcntl

    worker = make_worker()
    descriptor = os.memfd_create("frozen", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, ANSWERS_BYTES)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    memory = HostMemory(descriptor, ANSWERS_BYTES, writable=False)
    worker.send(98, memory)
    memory.close()
    spec = TensorSpec((ANSWERS_BYTES,), torch.uint8)
    with pytest.raises(grpc.RpcError) as caught:
        worker.register(host_region("answers", 98, spec))
    assert caught.value.code() == INVALID
