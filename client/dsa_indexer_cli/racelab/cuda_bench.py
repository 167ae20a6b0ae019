"""The lab's bench on a GPU: a service in a process of its own, and a worker's session with it.

What both sides find arrives here: what the service finds, by a file. Both processes share the GPU
under MPS.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor

from attention_worker.device_session import DeviceIndexer
from attention_worker.placements import Placement
from attention_worker.worker_banks import WorkerBank
from dsa_indexer_cli.demo.service_process import ServiceProcess, own_environment
from dsa_indexer_cli.racelab import batches
from dsa_indexer_cli.racelab.batches import Sort
from dsa_indexer_cli.racelab.cuda_service import ReadFindings
from dsa_indexer_cli.racelab.provocation import Seen
from dsa_indexer_cli.racelab.service import Collected
from indexer_client import ClientSettings, StepInputs
from indexer_service.kernels import k_cache, warm_up
from ipc_handoff.addresses import UNIX
from ipc_handoff.findings import FindingKind

GEOMETRY = batches.geometry(heads=64, page_size=64, top_k=64, max_context=512)
PAGES = batches.pages(GEOMETRY)
NEXT_N = (1, 2, 3, 4)

_POOL = 16
_LOG_TAIL = 600
_READY_SECONDS = 240.0
_REPORT_SECONDS = 0.5
"""A report that does not come within this time brings no finding."""
PENDING_CYCLES = 2_000_000
"""About a millisecond of an H200: so long is a copy, or a publication, pending."""


class Terms(NamedTuple):
    """gate: bound of the service's gates, seconds; is_open: a step's own gate does not wait."""

    gate: float
    is_open: bool


PATIENT, HASTY, OPEN = Terms(1.0, False), Terms(0.02, False), Terms(1.0, True)


class CudaBench:
    """Made by `cuda_bench`.

    Attributes:
        device: of the worker.
        indexer: the worker's session.
    """

    def __init__(
        self,
        indexer: DeviceIndexer,
        device: torch.device,
        found: Collected,
        service: ReadFindings,
    ) -> None:
        self.indexer, self.device, self._found = indexer, device, found
        self._service, self._of_service = service, Collected("service")
        self._random = torch.Generator().manual_seed(3)
        rows, heads, dim = GEOMETRY.max_rows, GEOMETRY.heads, GEOMETRY.head_dim
        q = torch.randn(_POOL, rows, heads, dim, generator=self._random)
        self._q = q.to(torch.float8_e4m3fn).view(torch.uint8).to(device)
        self._weights = torch.randn(_POOL, rows, heads, generator=self._random).to(device)
        self.out = torch.empty(rows, GEOMETRY.top_k, dtype=torch.int32, device=device)
        self._drawn = 0

    def batch(self, sort: Sort) -> StepInputs:
        """With tensors on the device; query offsets are always exact, as they must be there."""
        made = batches.make(GEOMETRY, sort, self._random)
        assert made.positions is not None
        assert made.slots is not None
        return replace(
            made,
            query_start=made.query_start.to(self.device),
            seq_lens=made.seq_lens.to(self.device),
            block_table=made.block_table.to(self.device),
            exact_query_start=made.query_start.tolist(),
            positions=made.positions.to(self.device),
            slots=made.slots.to(self.device),
        )

    def query(self, rows: int) -> tuple[Tensor, Tensor]:
        """q and weights of a layer, drawn from a pool."""
        self._drawn += 1
        place = self._drawn % _POOL
        return self._q[place, :rows], self._weights[place, :rows]

    @property
    def bank(self) -> WorkerBank:
        """Of the attachment."""
        attachment = self.indexer._attachment
        assert attachment is not None
        return cast(WorkerBank, attachment.bank)

    @property
    def next_step(self) -> int:
        """The number that it will have."""
        return self.indexer._steps + 1

    def begin(self, inputs: StepInputs) -> int:
        """Publish the next step; its number."""
        return self.indexer.begin_step(inputs)

    def select(self, rows: int) -> None:
        """Enqueue the layers of the step that was begun."""
        for layer in GEOMETRY.layers:
            self.indexer.select(layer, *self.query(rows), self.out[:rows])

    def run(self, inputs: StepInputs) -> int:
        """A whole step, until the GPU is done with it."""
        step = self.begin(inputs)
        self.select(inputs.rows)
        torch.cuda.current_stream().synchronize()
        return step

    def forget(self) -> None:
        self._hear()
        for side in (self._found, self._of_service):
            side.findings.clear()

    def findings(self) -> list[Seen]:
        self._hear()
        sides = (self._found, self._of_service)
        return [Seen(side.side, finding) for side in sides for finding in side.findings]

    def _hear(self) -> None:
        """What kernels, reports and the service have told; what a next step would do first."""
        self.indexer.look()
        self._of_service.findings += self._service.new()

    def of(self, step: int, kind: FindingKind) -> Sequence[Seen]:
        """Waits until the step's report has come, or will not."""
        deadline = time.monotonic() + _REPORT_SECONDS
        while not (found := self._told(step, kind)) and time.monotonic() < deadline:
            time.sleep(0.0005)
        return found

    def _told(self, step: int, kind: FindingKind) -> list[Seen]:
        return [
            seen for seen in self.findings() if seen.finding.step == step
            and seen.finding.kind is kind
        ]  # fmt: skip

    def wait_for_reports(self) -> None:
        """Of steps that the GPU is done with."""
        time.sleep(_REPORT_SECONDS)
        self._hear()

    def make_kernels(self) -> None:
        """Run steps of every size of decode until the service answers them."""
        deadline = time.monotonic() + _READY_SECONDS
        for next_n in NEXT_N:
            inputs = self.batch(Sort(next_n=next_n))
            while time.monotonic() < deadline:
                before = self.indexer.statistics.answered_layers
                self.run(inputs)
                if self.indexer.statistics.answered_layers > before:
                    break
                self.indexer.wait_attached(_READY_SECONDS)
                time.sleep(0.1)


def k_caches(device: torch.device) -> dict[int, Tensor]:
    """One of random keys a layer."""
    made = {}
    for layer in GEOMETRY.layers:
        made[layer] = torch.zeros(
            (PAGES, GEOMETRY.page_size, GEOMETRY.head_dim + 4), dtype=torch.uint8, device=device
        )
        keys = torch.randn(PAGES * GEOMETRY.page_size, GEOMETRY.head_dim, device=device)
        slots = torch.arange(len(keys), device=device)
        k_cache.insert(keys.to(torch.bfloat16), slots, made[layer])
    return made


@contextmanager
def cuda_bench(terms: Terms, log: Path, detectors: str = "all") -> Iterator[CudaBench]:
    """An attached bench on the first GPU.

    Args:
        log: of the service.

    Raises:
        RuntimeError: no MPS daemon serves the GPU, or the service does not come up.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("device: no GPU is here (fix: --device cpu)")
    device = torch.device("cuda", 0)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dsa-indexer-racelab-"))
        stack.enter_context(own_environment())
        address = f"{UNIX}{Path(folder) / 'sockets' / 'indexer.sock'}"
        findings = Path(folder) / "findings.jsonl"
        program = [
            sys.executable, "-m", "dsa_indexer_cli.racelab.cuda_service", address,
            str(terms.gate), detectors, str(int(terms.is_open)), str(findings),
        ]  # fmt: skip
        service = ServiceProcess(address, None, log, program)
        stack.callback(service.stop)
        try:
            service.start()
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {log.read_text()[-_LOG_TAIL:]}") from None
        found = Collected("worker")
        settings = ClientSettings(
            address=address,
            placement="mps",
            reattach_seconds=0.05,
            rpc_timeout_seconds=60.0,
            banks=4,
            detectors=detectors,
        )
        caches = k_caches(device)
        indexer = DeviceIndexer(GEOMETRY, caches, device=device, settings=settings, findings=found)
        stack.callback(indexer.close)
        if indexer.placement is not Placement.MPS:
            raise RuntimeError(indexer.placement_reason)
        with mock.patch.object(warm_up, "tuned_operations", lambda *_: iter(())):
            indexer.warm_up(NEXT_N)
        indexer.start()
        indexer.wait_attached(_READY_SECONDS)
        made = CudaBench(indexer, device, found, ReadFindings(findings))
        made.make_kernels()
        made.forget()
        yield made
