"""A worker on a GPU and the services that it lives beside: started, killed, started again.

`python -m tests.attention_worker.worker_program FOLDER PLACEMENT SERVICE_DEVICE` prints one JSON
line of what happened. A process of its own: MPS must be there before its first use of the GPU.
"""

import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from attention_worker.device_session import DeviceIndexer
from attention_worker.device_steps import DeviceSteps
from attention_worker.placements import Placement
from indexer_client import ClientSettings
from tests.attention_worker.fault_worker import poison
from tests.attention_worker.gpu_steps import GEOMETRY, GpuSteps
from tests.attention_worker.gpu_worker import Captured
from tests.attention_worker.services import READY_SECONDS, Services

REQUESTS = 8
STEPS = 50
ATTACHED_AT, KILLED_AT, BACK_AT = 6, 20, 30


def begin(indexer: DeviceIndexer, case: Any) -> float:
    """`begin_step`, which must not wait for the device; its milliseconds."""
    began = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    try:
        indexer.begin_step(case.inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return (time.perf_counter() - began) * 1000


def spans(file: Path) -> dict[str, int]:
    """How many spans of each name this process has exported."""
    if not file.exists():
        return {}
    return dict(Counter(json.loads(line)["name"] for line in file.read_text().splitlines()))


def live(folder: Path, placement: str, service_device: int) -> dict[str, Any]:
    steps = GpuSteps(torch.device("cuda", 0))
    services = Services(folder, service_device, 2)
    services.start()  # comes up meanwhile
    settings = ClientSettings(
        address=services.address, placement=placement, reattach_seconds=0.1,
        rpc_timeout_seconds=READY_SECONDS, trace_file=folder / "trace.jsonl",
    )  # fmt: skip
    indexer = DeviceIndexer(
        GEOMETRY, steps.k_caches, device=torch.device("cuda", 0), settings=settings,
        service_device=service_device,
    )  # fmt: skip
    poison(indexer)
    if indexer.placement is Placement.PEER_GPU:
        for layer, cache in steps.k_caches.items():
            indexer._shared[layer].tensor.copy_(cache)
    DeviceSteps.warm_up(indexer, (1,))
    told: dict[str, Any] = {"placement": str(indexer.placement), "why": indexer.placement_reason}
    cases = [steps.case(number, 1 + number % REQUESTS) for number in range(1, STEPS + 1)]
    wrong: list[str] = []
    answered: list[int] = []
    host_ms: list[float] = []
    step_ms: list[float] = []
    captured = Captured(indexer, steps, REQUESTS, 1)
    try:
        indexer.start()
        for number, case in enumerate(cases, start=1):
            if number == ATTACHED_AT:
                indexer.wait_attached(READY_SECONDS)
                told["reasons"] = indexer.reasons
            if number == BACK_AT:
                services.start()
                services.wait_until_it_serves()
                began = time.monotonic()
                indexer.wait_attached(READY_SECONDS)
                told["seconds_to_attach_again"] = round(time.monotonic() - began, 2)
            host_ms.append(begin(indexer, case))
            torch.cuda.synchronize()
            began = time.perf_counter()
            captured.replay(case)
            if number == KILLED_AT:
                services.send(signal.SIGKILL)
            bad = captured.wrong(case)
            step_ms.append((time.perf_counter() - began) * 1000)
            wrong += [f"step {number}, {line}" for line in bad]
            answered.append(indexer.statistics.answered_layers)
            if number == KILLED_AT + 2:
                told["last_error_without_a_service"] = str(indexer.last_error)
        statistics = indexer.statistics
        told["stamps"] = indexer.stamps(STEPS) is not None
    finally:
        indexer.close()
        services.close()
    captured.graph.replay()
    torch.cuda.synchronize()
    told["spans"] = spans(folder / "trace.jsonl")
    told |= {
        "wrong": wrong[:5], "answered": answered, "statistics": str(statistics),
        "detachments": statistics.detachments, "attachments": statistics.attachments,
        "host_ms_most": round(max(host_ms[1:]), 3),
        "host_ms_median": round(sorted(host_ms)[len(host_ms) // 2], 3),
        "step_ms_at_the_kill": [round(ms, 2) for ms in step_ms[KILLED_AT - 2 : KILLED_AT + 3]],
        "step_ms_median": round(sorted(step_ms)[len(step_ms) // 2], 3),
    }  # fmt: skip
    return told


def main(folder: str, placement: str, service_device: str) -> None:
    with patch("indexer_service.kernels.warm_up.tuned_operations", lambda *arguments: iter(())):
        print(json.dumps(live(Path(folder), placement, int(service_device))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
