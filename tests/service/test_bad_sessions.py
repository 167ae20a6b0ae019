"""Every bad OpenSession is refused with field and fix, and no call harms another session."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.layout import LAYOUT_VERSION
from ipc_handoff.wire import geometry_message, layout_message
from tests.service.support import (
    GEOMETRY,
    LocalService,
    Worker,
    open_request,
    refused,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
FAILED = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
NOT_FOUND = grpc.StatusCode.NOT_FOUND
pytestmark = pytest.mark.usefixtures("neighbour")


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
    assert "larger than max" in caught.value.details()
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
