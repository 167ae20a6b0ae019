"""A small workload for sessions on a GPU that is none."""

from collections.abc import Callable
from typing import Any

from dsa_indexer_cli.load.gpu_worker import GpuWorker
from dsa_indexer_cli.load.messages import Order
from dsa_indexer_cli.load.steps import PlannedStep
from dsa_indexer_cli.load.workload import Workload
from tests.load import fake_gpu
from tests.load.fake_gpu import FakeGpu

WORKLOAD: dict[str, Any] = {
    "name": "small",
    "model": {"layers": 3, "heads": 16, "top_k": 16, "page_size": 32},
    "load": {"seconds": 200, "warm_up_seconds": 0.05, "placement": "mps"},
    "steps": {
        "batch": {"kind": "uniform", "low": 1, "high": 6},
        "context": {"kind": "uniform", "low": 8, "high": 90},
        "prefill_rows": {"kind": "fixed", "value": 5},
        "rows_per_decode": 2,
        "mix": {"decode": 4, "mixed": 1, "prefill": 1},
    },
    "check": {"share": 1.0},
}
UUID = "GPU-1"


def workload(**tables: dict[str, Any]) -> Workload:
    return Workload(**{**WORKLOAD, **{k: {**WORKLOAD.get(k, {}), **v} for k, v in tables.items()}})


def worker(gpu: FakeGpu, **tables: dict[str, Any]) -> GpuWorker:
    made = GpuWorker(Order(0, "unix:/x", workload(**tables), fake_gpu.good, UUID), gpu)
    made.open(lambda _: None)
    return made


def steps_with(made: GpuWorker, wanted: Callable[[PlannedStep], bool]) -> int:
    return next(
        number for number in range(len(made.steps.shapes)) if wanted(made.steps.step(number))
    )
