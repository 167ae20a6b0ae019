"""Regions: mapped once, counted, all or nothing, and given back only between steps."""

from collections.abc import Callable

import grpc
import pytest
import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.regions import HostMemory, TensorSpec
from ipc_handoff.wire import host_region
from tests.service.support import (
    GEOMETRY,
    K_CACHE_TOKEN,
    Worker,
    mappings,
    refused,
)
from tests.support.waiting import SOON, eventually

MakeWorker = Callable[..., Worker]


def test_regions_of_one_memory_map_it_once(make_worker: MakeWorker) -> None:
    worker = make_worker()
    assert worker.register(*worker.k_cache_regions()) == worker.k_cache.byte_size


def test_a_mapping_goes_with_its_last_region(make_worker: MakeWorker) -> None:
    worker = make_worker()
    own = mappings()
    worker.register(*worker.k_cache_regions())
    assert worker.unregister("k_cache/3") == worker.k_cache.byte_size
    assert len(mappings() - own) == 1
    assert worker.unregister("k_cache/7") == 0
    assert mappings() <= own


def test_a_region_can_be_registered_again(make_worker: MakeWorker) -> None:
    worker = make_worker().attach()
    assert worker.works()
    bytes_before = worker.service.status().mapped_bytes
    worker.unregister("k_cache/3", "k_cache/7")
    worker.register(*worker.k_cache_regions())
    assert worker.works()
    assert worker.service.status().mapped_bytes == bytes_before


def test_a_token_in_use_names_its_memory_for_further_regions(make_worker: MakeWorker) -> None:
    worker = make_worker()
    first, second = worker.k_cache_regions()
    mapped = worker.register(first)
    assert worker.register(second) == mapped


def test_a_token_is_unknown_once_its_mapping_is_gone(make_worker: MakeWorker) -> None:
    worker = make_worker()
    first, _ = worker.k_cache_regions()
    worker.register(first)
    worker.unregister(first.name)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "k_cache/3.host.token"):
        worker.register(first)


@pytest.fixture
def shared(make_worker: MakeWorker) -> tuple[Worker, HostMemory, list[pb.Region]]:
    """Answers (written) and staging (read) in one memory."""
    worker = make_worker()
    size = GEOMETRY.answers.size + GEOMETRY.staging.size
    memory = HostMemory.create(size, "both")
    worker.send(20, memory)
    answers = TensorSpec((GEOMETRY.answers.size,), torch.uint8)
    staging = TensorSpec((GEOMETRY.staging.size,), torch.uint8)
    regions = [
        host_region("answers", 20, answers),
        host_region("staging", 20, staging, offset=GEOMETRY.answers.size),
    ]
    return worker, memory, regions


def test_one_memory_is_mapped_once_a_kind_of_access(
    shared: tuple[Worker, HostMemory, list[pb.Region]],
) -> None:
    worker, memory, regions = shared
    assert worker.register(*regions) == 2 * memory.byte_size
    assert worker.unregister("answers") == memory.byte_size
    assert worker.unregister("staging") == 0


@pytest.mark.parametrize("first", ["answers", "staging"])
def test_each_kind_of_access_outlives_the_other(
    shared: tuple[Worker, HostMemory, list[pb.Region]], first: str
) -> None:
    worker, memory, regions = shared
    worker.register(*regions)
    worker.unregister(first)
    again = next(region for region in regions if region.name == first)
    assert worker.register(again) == 2 * memory.byte_size


def test_memory_that_is_only_read_is_mapped_read_only(make_worker: MakeWorker) -> None:
    def of_bank() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        with open("/proc/self/maps") as maps:
            for line in maps:
                if "dsa-indexer:" in line:
                    name = line.split("dsa-indexer:")[1].split()[0]
                    found.setdefault(name, set()).add(line.split()[1])
        return found

    worker = make_worker().attach()
    assert worker.works()
    # The worker's own mappings, in this same process, are writable.
    assert of_bank()["staging0"] == {"rw-s", "r--s"}
    assert of_bank()["k_cache"] == {"rw-s", "r--s"}
    assert of_bank()["control0"] == {"rw-s"}
    assert of_bank()["answers0"] == {"rw-s"}


@pytest.mark.parametrize("bad", [0, 2, 4])
def test_a_failed_register_leaves_no_mapping_and_no_descriptor(
    make_worker: MakeWorker, bad: int
) -> None:
    worker = make_worker()
    own, held = mappings(), worker.duplicates()
    regions = [*worker.bank_regions(), *worker.k_cache_regions()]
    regions[bad].host.offset = 1 << 50
    with refused(grpc.StatusCode.INVALID_ARGUMENT, f"{regions[bad].name}.byte_size"):
        worker.register(*regions)
    assert mappings() <= own
    assert worker.duplicates() == held


def test_a_failed_register_keeps_what_was_registered(worker: Worker) -> None:
    before = worker.service.status().mapped_bytes
    worker.unregister("k_cache/7")
    bad = worker.k_cache_of(7)
    bad.shape[1] = 64
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "k_cache/7.shape"):
        worker.register(bad)
    assert worker.service.status().mapped_bytes == before
    assert worker.works()


def test_a_failed_unregister_gives_nothing_back(worker: Worker) -> None:
    with refused(grpc.StatusCode.NOT_FOUND, "names"):
        worker.unregister("k_cache/3", "control", "spare")
    assert worker.works()


def test_a_k_cache_with_gaps_between_pages(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.send_wakeups()
    page = GEOMETRY.page_size * 132
    worker.send(K_CACHE_TOKEN, worker.k_cache)
    spec = TensorSpec((4, GEOMETRY.page_size, 132), torch.uint8, (page * 2, 132, 1))
    worker.register(*worker.bank_regions(), host_region("k_cache/3", K_CACHE_TOKEN, spec))
    assert worker.works()


def test_a_k_cache_is_given_back_after_the_running_step(worker: Worker) -> None:
    call = worker.stub.SelectTopK.future(
        pb.SelectTopKRequest(session_id=worker.id, plan=(plan := worker.plan()))
    )
    assert eventually(lambda: worker.service.status().sessions[-1].last_step == plan.step)
    waiting = worker.stub.UnregisterRegions.future(
        pb.UnregisterRegionsRequest(
            session_id=worker.id, epoch=worker.epoch, names=["k_cache/3", "k_cache/7"]
        )
    )
    worker.stage(plan)
    assert call.result(SOON).report.status == pb.STEP_STATUS_ANSWERED
    waiting.result(SOON)


def test_giving_the_bank_back_drains_first(worker: Worker) -> None:
    assert worker.works()
    worker.unregister("control", "staging", "answers")
    assert worker.bank.control.bells.is_drained()
    assert worker.service.status().sessions[-1].answered_steps == 1
