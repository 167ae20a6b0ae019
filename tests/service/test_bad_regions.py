"""Every bad region is refused with field and fix, and leaves its session and others working."""

import fcntl
import os
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.regions import HostMemory, TensorSpec
from ipc_handoff.wire import host_region
from tests.service.support import (
    GEOMETRY,
    K_CACHE_TOKEN,
    LocalService,
    Worker,
    refused,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
FAILED = grpc.StatusCode.FAILED_PRECONDITION
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXISTS = grpc.StatusCode.ALREADY_EXISTS
MakeWorker = Callable[..., Worker]
pytestmark = pytest.mark.usefixtures("neighbour")


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


@pytest.mark.parametrize("field", ["shape", "strides"])
def test_a_region_of_thousands_of_dimensions(field: str, make_worker: MakeWorker) -> None:
    """Multiplying them would hold up the whole process for seconds or minutes."""
    worker = make_worker()
    regions = worker.bank_regions()
    _, change = region("answers", **{field: [2**62] * 30_000})
    change(next(r for r in regions if r.name == "answers"))
    with refused(INVALID, f"answers.{field}", "30000 dimensions"):
        worker.register(*regions)
    assert worker.attach().works()


def test_more_regions_than_there_are_names(make_worker: MakeWorker) -> None:
    worker = make_worker()
    regions = worker.bank_regions()
    with refused(INVALID, "regions", "100000 regions", "at most 5"):
        worker.register(*regions, *[regions[0]] * 99_997)
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


def test_unregister_more_names_than_there_are(worker: Worker) -> None:
    with refused(INVALID, "names", "100000 names", "at most 5"):
        worker.unregister(*["control"] * 100_000)
    assert worker.works()


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


def test_a_memory_without_bytes_to_write(make_worker: MakeWorker) -> None:
    """Memory sealed against writing cannot hold answers."""
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
