"""The lab's bench: a service, a worker's session with it, and what both sides have found."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attention_worker.fallback import InlineSelector
from dsa_indexer_cli.demo.service_process import own_environment
from dsa_indexer_cli.racelab import batches
from dsa_indexer_cli.racelab.batches import Sort
from dsa_indexer_cli.racelab.provocation import Seen
from dsa_indexer_cli.racelab.service import Collected, FinishedSteps, LabEngine, LabService
from indexer_client import ClientSettings, Session, StepInputs
from indexer_client.attachment import Attachment
from indexer_client.step import Step
from indexer_service.events import StepObserver, StepObservers
from indexer_service.kernels import k_cache
from indexer_service.settings import load
from indexer_service.telemetry import StepTelemetry
from ipc_handoff.addresses import UNIX
from ipc_handoff.banks import HostBank
from ipc_handoff.control import ServiceControl
from ipc_handoff.findings import FindingKind
from ipc_handoff.regions import SharedTensor
from ipc_handoff.telemetry.settings import TraceSettings
from ipc_handoff.telemetry.tracing import start as start_tracing

GEOMETRY = batches.geometry(heads=16, page_size=32, top_k=16, max_context=128)
SHARING_LAYER = 1
"""Has no indexer: attends to what layer 0 selected."""
PAGES = batches.pages(GEOMETRY)

SOON = 10.0
READ = 0.02
"""A service that nothing holds up has read what it wants to read after so many seconds."""

_POOL = 64
_LEASE_SECONDS = 600.0


class Bounds(NamedTuple):
    """Seconds: of the service's gates, and of the worker's waits."""

    gate: float
    wait: float


PATIENT = Bounds(60.0, 60.0)
"""No wait ends by itself, however slow the machine is: where a process gets no time for so long, a
wait that ends is no false alarm.
"""
HASTY = Bounds(0.005, 0.005)


class Bench:
    """Made by `bench`.

    Attributes:
        session: of the target model; draft: another one with the same service.
        copies: the thread that stands for the engine's stream of copies.
    """

    def __init__(
        self, engine: LabEngine, finished: FinishedSteps, sides: tuple[Collected, ...],
        client: ClientSettings, seed: int,
    ) -> None:  # fmt: skip
        self.engine, self.finished, self._sides = engine, finished, sides
        self.copies = ThreadPoolExecutor(1)
        self._random = torch.Generator().manual_seed(seed)
        self.k_caches = {
            layer: SharedTensor.allocate(
                (PAGES, GEOMETRY.page_size, 132), torch.uint8, f"layer{layer}"
            )
            for layer in GEOMETRY.layers
        }
        for cache in self.k_caches.values():
            keys = torch.randn(PAGES * GEOMETRY.page_size, 128, generator=self._random)
            k_cache.insert(keys.to(torch.bfloat16), torch.arange(len(keys)), cache.tensor)
        tensors = {layer: cache.tensor for layer, cache in self.k_caches.items()}
        self.inline = InlineSelector(tensors, GEOMETRY.top_k)
        self.session, self.draft = (
            Session(
                GEOMETRY, self.k_caches, self.inline, settings=client, model=model,
                findings=sides[0],
            )
            for model in ("target", "draft")
        )  # fmt: skip
        shape = (GEOMETRY.max_rows, GEOMETRY.heads, GEOMETRY.head_dim)
        self._queries = [
            torch.randn(shape, generator=self._random).to(torch.float8_e4m3fn) for _ in range(_POOL)
        ]
        self._weights = torch.randn(_POOL, *shape[:2], generator=self._random)
        self.out = torch.empty(GEOMETRY.max_rows, GEOMETRY.top_k, dtype=torch.int32)
        self._drawn = 0

    def close(self) -> None:
        for session in (self.session, self.draft):
            session.close()
        self.copies.shutdown()
        for cache in self.k_caches.values():
            cache.memory.close()

    # What steps are made of.

    def batch(self, sort: Sort) -> StepInputs:
        return batches.make(GEOMETRY, sort, self._random)

    def query(self, rows: int) -> tuple[Tensor, Tensor]:
        """q and weights of a layer, drawn from a pool."""
        self._drawn += 1
        place = self._drawn % _POOL
        return self._queries[place][:rows], self._weights[place, :rows]

    def select(self, step: Step, layer: int) -> Tensor:
        """One layer of an entered step; the rows that were handed back."""
        rows = step.inputs.rows
        out = self.out[:rows]
        step.select(layer, *self.query(rows), out=out)
        return out

    def run(self, inputs: StepInputs, *, settled: bool = True) -> int:
        """A whole step, until the service has finished it too; its number.

        Args:
            settled: False: do not wait for the service.
        """
        with self.session.step(inputs) as step:
            for layer in GEOMETRY.layers:
                self.select(step, layer)
        if settled:
            self.settle(step.number)
        return step.number

    def settle(self, step: int, seconds: float = SOON) -> None:
        """Wait until the service has said all that it has to say of a step."""
        epoch = self.session.epoch
        if epoch is not None:
            self.finished.wait(epoch, step, seconds)

    # Both sides' insides, for what takes guards away.

    @property
    def attachment(self) -> Attachment:
        """Of the target's session, which has one."""
        attachment = self.session._attachment
        assert attachment is not None
        return attachment

    @property
    def bank(self) -> HostBank:
        """As the worker has it mapped."""
        bank = self.attachment.bank
        assert isinstance(bank, HostBank)
        return bank

    def service_control(self) -> ServiceControl:
        """The attachment's words as another service would have them."""
        return ServiceControl(self.bank.control._buffer, GEOMETRY, self.attachment.epoch)

    # What was found.

    def findings(self) -> list[Seen]:
        return [Seen(side.side, finding) for side in self._sides for finding in side.findings]

    def of(self, step: int, kind: FindingKind) -> list[Seen]:
        """Of the target's session."""
        return [
            seen for seen in self.findings() if seen.finding.step == step
            and seen.finding.kind is kind
        ]  # fmt: skip

    def forget(self) -> None:
        for side in self._sides:
            side.findings.clear()


@contextmanager
def bench(
    detectors: str = "all",
    bounds: Bounds = PATIENT,
    seed: int = 1,
    trace_file: Path | None = None,
) -> Iterator[Bench]:
    """An attached bench.

    Args:
        detectors: the setting of both sides.
        trace_file: both sides append the spans of steps in which something was found.
    """
    worker, service, finished, engine = (
        Collected("worker"), Collected("service"), FinishedSteps(), LabEngine(),
    )  # fmt: skip
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dsa-indexer-racelab-"))
        stack.enter_context(own_environment())
        settings = load(
            {
                "address": f"{UNIX}{Path(folder) / 'sockets' / 'indexer.sock'}",
                "gate_bound_seconds": bounds.gate,
                "lease_seconds": _LEASE_SECONDS,
                "detectors": detectors,
            }
        )
        observers: list[StepObserver] = [finished]
        if (tracing := start_tracing(TraceSettings("racelab-service", trace_file))) is not None:
            stack.callback(tracing.close)
            observers.insert(0, StepTelemetry(tracing))
        running = LabService(
            settings, engine=engine, observer=StepObservers(*observers), findings=service
        ).start()
        stack.callback(running.stop)
        client = ClientSettings(
            address=running.address,
            wait_bound_seconds=bounds.wait,
            reattach_seconds=0.05,
            banks=4,
            detectors=detectors,
            trace_file=trace_file,
            trace_ratio=0.0,
        )
        made = Bench(engine, finished, (worker, service), client, seed)
        stack.callback(made.close)
        for session in (made.session, made.draft):
            session.start()
            session.wait_attached(SOON)
        made.run(made.batch(Sort()))
        yield made
