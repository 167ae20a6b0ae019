"""A session's device memory on a GPU, owned by another process."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from indexer_service.devices import service_device
from indexer_service.session_regions import DeviceTerms, SessionRegions
from ipc_handoff import cuda_runtime
from ipc_handoff.cuda_regions import CudaExport
from ipc_handoff.errors import RegionError
from ipc_handoff.regions import TensorSpec
from ipc_handoff.wire import cuda_region
from tests.ipc_handoff.cuda_children import PART, SIZE, pattern, read
from tests.ipc_handoff.support import Peer, peer
from tests.service.support import GEOMETRY

pytestmark = pytest.mark.gpu

PAGE = 32 * 132
CACHE = TensorSpec((16, 32, 132), torch.uint8, (PAGE + 4, 132, 1))
BYTES = TensorSpec((SIZE,), torch.uint8)


@pytest.fixture
def owner() -> Iterator[Peer]:
    with peer("own", program="cuda_children") as process:
        yield process


def test_caches_and_banks_of_a_worker_are_read_where_they_lie(owner: Peer) -> None:
    device = service_device("auto")
    assert device.ordinal == 0
    terms = DeviceTerms(0, "child", device.gpu_uuid, device.gpu_uuid)
    regions = SessionRegions(GEOMETRY, 1, None, terms)
    part = read(owner.ask("part 4"))
    cache = cuda_region("k_cache/3", part, CACHE)
    staging = cuda_region("staging", read(owner.ask("allocate 5")), BYTES)
    answers = cuda_region("answers", read(owner.ask("allocate 6")), BYTES)
    with pytest.raises(RegionError, match=r"answers\.byte_size: .*stay inside the allocation"):
        wrong = cuda_region("answers", read(owner.ask("allocate 7")), BYTES)
        wrong.byte_size = 1 << 40
        regions.register([cache, staging, wrong])
    assert regions.mapped_bytes == 0
    regions.register([cache, staging, answers])
    assert regions.mapped_bytes == CACHE.byte_size + 2 * SIZE
    views, seen = regions.device_views(), regions.k_cache(3)
    assert views is not None
    assert seen is not None
    expected = pattern(PART, 4).as_strided(CACHE.shape, CACHE.strides)
    assert torch.equal(seen.cpu(), expected)
    for address, seed in ((views.staging_address, 5), (views.answers_address, 6)):
        assert torch.equal(read_at(address).cpu(), pattern(SIZE, seed))
    addresses = views.staging_address, views.answers_address
    del seen
    regions.close()
    gc.collect()
    for address in addresses:
        with pytest.raises(RegionError, match="in no CUDA allocation"):
            cuda_runtime.address_range(0, address, "closed")


def read_at(address: int) -> torch.Tensor:
    """SIZE bytes at an address."""

    class View:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (SIZE,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }

    return torch.as_tensor(View()).clone()


def test_memory_of_a_dead_worker_is_given_back(owner: Peer) -> None:
    device = service_device("cuda:0")
    regions = SessionRegions(
        GEOMETRY, 1, None, DeviceTerms(0, "dies", device.gpu_uuid, device.gpu_uuid)
    )
    export: CudaExport = read(owner.ask("allocate 8"))
    regions.register([cuda_region("staging", export, BYTES)])
    with pytest.raises(Exception, match=r"answers\.cuda_ipc\.gpu_uuid"):
        regions.register([cuda_region("answers", replace(export, gpu_uuid="GPU-0"), BYTES)])
    owner.kill()
    regions.close()
    assert int(torch.ones(4, device="cuda").sum()) == 4
