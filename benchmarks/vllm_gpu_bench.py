"""What the phases of the vLLM comparison share: services, engines, a deadline, faults noted."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from handoff_gpu import mps
from vllm_gpu_cases import Case
from vllm_gpu_compare import Found
from vllm_gpu_model import SIZES
from vllm_gpu_processes import Engine, EngineFailed, Service

ATTACH_SECONDS, START_SECONDS, ANSWER_SECONDS = 120.0, 240.0, 150.0


class Bench:
    """Engines and services of one run; all end with the `with` block.

    Args:
        size: a name of `SIZES`.
        device: what services are started on: cpu or cuda.
        folder: for logs, sockets and samples.
        seconds: from now, as of `give`.
    """

    def __init__(self, size: str, device: str, folder: Path, seconds: float) -> None:
        self.size, self._device, self.folder = SIZES[size], device, folder
        self._name = size
        self.give(seconds)
        self._plain = {**os.environ, "DSA_INDEXER_ALLOW_UNTESTED": "1"}
        self._client = dict(self._plain)
        self._services: dict[tuple[Any, ...], list[Service]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Bench":
        if self._device != "cpu":
            under = self._stack.enter_context(mps(self.folder / "mps"))
            self._client |= {name: under[name] for name in under if name.startswith("CUDA_MPS_")}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def engines(self, cases: Mapping[str, Case], found: Found) -> Iterator[dict[str, Engine]]:
        """Starts them side by side; those that have not started are noted in `found`."""
        running: dict[str, Engine] = {}
        with ExitStack() as stack:
            for name, case in cases.items():
                with noted(found, name):
                    running[name] = self._start(case, f"{len(os.listdir(self.folder))}.log")
                    stack.callback(running[name].close)
            for name, engine in list(running.items()):
                with noted(found, name):
                    found[name] |= engine.wait_started(self.at_most(START_SECONDS))
                if "failed" in found[name]:
                    del running[name]
            yield running

    def services(self, case: Case) -> list[Service]:
        """Of the case, one a GPU; started when they are first asked for."""
        assert case.service is not None
        key = (case.gpus, *case.service.items())
        if key not in self._services:
            folder = self.folder / f"services{len(self._services)}"
            devices = [self._device] if self._device == "cpu" else [
                f"{self._device}:{gpu}" for gpu in range(case.gpus)
            ]  # fmt: skip
            made = [
                Service(folder / str(gpu), device, {**self._client, **case.service})
                for gpu, device in enumerate(devices)
            ]
            for service in made:
                self._stack.callback(service.close)
            self._services[key] = made
        for service in self._services[key]:
            service.wait_serving()
        return self._services[key]

    def give(self, seconds: float) -> None:
        """After so long from now nothing is started or asked."""
        self._deadline = time.monotonic() + seconds

    def at_most(self, seconds: float) -> float:
        """So long, or until the deadline.

        Raises:
            EngineFailed: it is over.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise EngineFailed("no time was left")
        return min(seconds, left)

    def ask(self, engine: Engine, *request: Any) -> Any:
        """An engine's answer, which comes in time or never."""
        return engine.ask(*request, seconds=self.at_most(ANSWER_SECONDS))

    def _start(self, case: Case, log: str) -> Engine:
        self.at_most(START_SECONDS)
        variables = {}
        if case.service is not None:
            first = self.services(case)[0].address
            variables = {
                "DSA_INDEXER_ADDRESS": first.replace("/0/", "/{device}/"),
                # Whatever keeps the service away is to be seen; its first session tunes kernels.
                "DSA_INDEXER_ON_REFUSAL": "error",
                "DSA_INDEXER_ATTACH_SECONDS": str(ATTACH_SECONDS),
            }
        own = self._client if case.under_mps else self._plain
        return Engine(case, self._name, self.folder / log, {**own, **variables})


@contextmanager
def noted(found: Found, name: str) -> Iterator[None]:
    """What goes wrong with one engine is noted, and the next one has its turn."""
    found.setdefault(name, {})
    try:
        yield
    except (EngineFailed, RuntimeError, OSError) as error:
        found[name]["failed"] = str(error)
        print(f"{name}: failed: {str(error)[-600:]}", flush=True)
