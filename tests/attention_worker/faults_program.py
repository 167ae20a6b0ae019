"""`python -m tests.attention_worker.faults_program FOLDER PLACEMENT SERVICE_DEVICE [PART ...]`:
`faults`, or those of which a PART is in the name.

Prints one JSON line a case. A process of its own: MPS must be there before its first use of the
GPU.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from attention_worker.device_session import DeviceIndexer
from attention_worker.device_steps import DeviceSteps
from indexer_client import ClientSettings
from indexer_service.kernels import k_cache
from indexer_service.step_kernels import tensor_at
from ipc_handoff import cuda_runtime
from tests.attention_worker import faults
from tests.attention_worker.fault_worker import REQUESTS, Forward, Worker, poison
from tests.attention_worker.gpu_steps import GEOMETRY, GpuSteps, pages_of
from tests.attention_worker.services import Services
from tests.support.waiting import eventually

DEVICE = torch.device("cuda", 0)
_HOST_MEMORY = "memfd:dsa-indexer"


def told(name: str, found: dict[str, Any]) -> None:
    print(json.dumps({"case": name} | found), flush=True)


class Room:
    """Device memory of K caches that can be freed and allocated again, apart from torch's."""

    def __init__(self) -> None:
        width = GEOMETRY.page_size * (GEOMETRY.head_dim + 4)
        self._size = pages_of(GEOMETRY) * len(GEOMETRY.layers) * width
        self.address = cuda_runtime.allocate(0, self._size, "room")

    def tensor(self) -> torch.Tensor:
        return tensor_at(self.address, (self._size,), torch.uint8, DEVICE)

    def again(self) -> bool:
        """Free it and allocate as much; whether it lies at the same address."""
        before = self.address
        cuda_runtime.free(0, before)
        self.address = cuda_runtime.allocate(0, self._size, "room")
        return self.address == before


def make(services: Services, placement: str, device: int, room: Room, *, seed: int) -> Worker:
    """A worker with its graph, and with keys in its K caches that it has inserted itself."""
    ours = GpuSteps(DEVICE, seed=seed, whole=room.tensor())
    reference = GpuSteps(DEVICE, inserts=True, seed=seed)
    settings = ClientSettings(
        address=services.address, placement=placement, reattach_seconds=0.1,
        rpc_timeout_seconds=1.0, banks=4,
    )  # fmt: skip
    indexer = DeviceIndexer(
        GEOMETRY, ours.k_caches, device=DEVICE, settings=settings, service_device=device
    )
    poison(indexer)
    tokens = reference.pages * GEOMETRY.page_size
    slots = torch.arange(tokens, device=DEVICE)
    for layer, cache in reference.k_caches.items():
        keys = torch.randn((tokens, GEOMETRY.head_dim), device=DEVICE).to(torch.bfloat16)
        indexer.insert(keys, slots, layer)
        k_cache.insert(keys, slots, cache)
    DeviceSteps.warm_up(indexer, (1,))
    captured = Forward(indexer, ours, REQUESTS)
    worker = Worker(indexer, reference, services, captured)
    worker.step(prefill=True)  # loads what a mixed step needs
    indexer.start()
    return worker


def mapped(pid: str | int) -> int:
    """Shared host memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(_HOST_MEMORY in line for line in lines)


def _nothing_is_mapped(services: Services) -> dict[str, Any]:
    """After everything was closed and dropped."""
    gc.collect()
    status = services.status()
    assert status is not None
    # The pauses' words, which belong to the test.
    return {
        "worker": mapped("self") - 1, "service": mapped(services.serving.pid) - 1,
        "mapped bytes": status.mapped_bytes, "sessions": len(status.sessions),
    }  # fmt: skip


def live(folder: Path, placement: str, device: int, *parts: str) -> None:
    chosen = faults.cases(placement, *parts)
    needed = faults.services_needed(chosen)
    services = Services(
        folder, device, needed,
        f"lease_seconds={faults.LEASE_SECONDS}", f"gate_bound_seconds={faults.GATE_SECONDS}",
    )  # fmt: skip
    services.start()
    try:
        room = Room()
        worker = make(services, placement, device, room, seed=1)
        services.wait_until_it_serves()
        worker.attach()
        worker.many(3)
        told("attached", {
            "placement": str(worker.indexer.placement), "reasons": worker.indexer.reasons,
            "answered": worker.answered, "wrong": worker.wrong, "ms": worker.times[-1],
        })  # fmt: skip
        faults.run(worker, chosen, told)
        told("statistics", {"all": str(worker.indexer.statistics)})
        worker.indexer.close()
        worker.captured.graph.replay()
        torch.cuda.synchronize()
        del worker
        gc.collect()
        same = room.again()
        again = make(services, placement, device, room, seed=2)
        again.attach()
        again.many(4)
        told("reallocated", {
            "same address": same, "wrong": again.wrong, "last answered": again.answered[-1],
        })  # fmt: skip
        again.indexer.close()
        del again
        gc.collect()
        torch.cuda.empty_cache()
        eventually(lambda: _nothing_is_mapped(services)["mapped bytes"] == 0, 5)
        told("mapped", _nothing_is_mapped(services))
    finally:
        services.close()


def main(folder: str, placement: str, device: str, *parts: str) -> None:
    with patch("indexer_service.kernels.warm_up.tuned_operations", lambda *arguments: iter(())):
        live(Path(folder), placement, int(device), *parts)


if __name__ == "__main__":
    main(*sys.argv[1:])
