"""The worker's session with an indexer service that may come and go."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.agreement import refusal_of_host_memory
from indexer_client.attachment import AttachRequest, worker_identity
from indexer_client.control_plane import check_tls
from indexer_client.errors import ServiceUnavailable
from indexer_client.inputs import Fallback, StepInputs
from indexer_client.metrics import start_metrics
from indexer_client.selection_stamps import SelectionStamps
from indexer_client.settings import ClientSettings
from indexer_client.staging import answers, check_tensors, publish, request, stage_layer
from indexer_client.statistics import Statistics
from indexer_client.step import Begun, Step
from indexer_client.worker_session import WorkerSession
from ipc_handoff.banks import BankPool, HostBank
from ipc_handoff.findings import FindingListener
from ipc_handoff.layout import STAMPED_STEPS, HandoffGeometry
from ipc_handoff.regions import SharedTensor
from ipc_handoff.stages import WORKER_STAGES
from ipc_handoff.stamps import StampRing
from ipc_handoff.telemetry.metrics import Metrics
from ipc_handoff.telemetry.tracing import Tracing
from ipc_handoff.telemetry.tracing import start as start_tracing


class Session(WorkerSession):
    """Steps whose selections come from the service, or from the fallback while there is none.

    Args:
        geometry: the indexer's shape and limits.
        k_caches: layer id -> uint8 [pages, page_size, head_dim + 4] in shared memory.
        fallback: computes a layer inline.
        settings: address, bounds; from `DSA_INDEXER_*` by default.
        engine_name, model: for people and for telling a worker's models apart.
        tracing, metrics: where spans and metrics go; by default what the settings say. Closed
            with the session.
        findings: told of what the detectors find, besides the log.
    """

    def __init__(
        self,
        geometry: HandoffGeometry,
        k_caches: Mapping[int, SharedTensor],
        fallback: Fallback,
        *,
        settings: ClientSettings | None = None,
        engine_name: str = "",
        model: str = "target",
        tracing: Tracing | None = None,
        metrics: Metrics | None = None,
        findings: FindingListener | None = None,
    ) -> None:
        settings = settings or ClientSettings()
        check_tls(settings)
        missing = set(geometry.layers) - set(k_caches)
        if missing:
            raise ValueError(f"k_caches: layer {min(missing)} is missing (fix: one a layer)")
        configuration = getattr(fallback, "configuration", None)
        request = AttachRequest(
            settings=settings,
            worker=worker_identity(str(uuid.uuid4()), model, engine_name),
            geometry=geometry,
            k_caches=k_caches,
            configuration_hash=configuration.hash if configuration is not None else "",
            tracing=tracing or start_tracing(settings.tracing),
        )
        self._stamps = StampRing.private(STAMPED_STEPS, len(geometry.layers), len(WORKER_STAGES))
        super().__init__(
            request,
            BankPool(partial(HostBank, geometry), settings.banks),
            self._stamps,
            metrics or start_metrics(settings),
            refusal_of_host_memory(settings.placement),
            findings=findings,
        )
        self._fallback = fallback
        self._private = torch.empty(geometry.max_rows, geometry.top_k, dtype=torch.int32)
        self._selections = SelectionStamps()
        self._step_is_open = False
        self._context: pb.TraceContext | None = None

    @property
    def statistics(self) -> Statistics:
        found = super().statistics
        return replace(found, lost_stamps=found.lost_stamps + self._stamps.lost)

    def step(self, inputs: StepInputs, layers: Sequence[int] | None = None) -> Step:
        """The next step; a context manager, and one is open at a time.

        Args:
            layers: layer ids in the order in which `Step.select` will be called; all by default.

        Raises:
            ValueError: the step does not fit the agreed geometry, or a layer has no indexer.
        """
        self._check_process()
        inputs.check(self.geometry)
        layers = self.geometry.layers if layers is None else layers
        self._check_layers(layers)
        self._record(inputs, layers)
        return Step(
            inputs=inputs,
            layers=layers,
            geometry=self.geometry,
            fallback=self._fallback,
            private=self._private,
            stamps=self._stamps,
            statistics=self._statistics,
            wait_bound=self.settings.wait_bound_seconds,
            traces=self._traces,
            findings=self._findings,
            selections=self._selections,
            begin=partial(self._begin_step, inputs),
            on_end=self._end_step,
        )

    def _begin_step(self, inputs: StepInputs) -> Begun:
        self._check_process()
        self._check_no_step()
        begun = self._next_step(inputs)
        self._step_is_open = True
        self._context = None if begun.trace is None else begun.trace.context
        return begun

    def _end_step(self) -> None:
        self._step_is_open = False
        self._read_reports()
        if self._metrics is not None:
            self._metrics.step_ended(self._steps, self._stamps.read(self._steps), self._context)

    def select_once(
        self,
        layer: int,
        q: torch.Tensor,
        weights: torch.Tensor,
        inputs: StepInputs,
        *,
        out: torch.Tensor,
    ) -> pb.StepReport:
        """One layer by one call (`SelectTopK`), for tools and debugging; no fallback.

        Arguments and shapes as for `Step.select`.

        Raises:
            IndexerError: the service refused, failed or is not there.
            ValueError: a tensor does not fit.
            RuntimeError: a step is open.
        """
        self._check_process()
        inputs.check(self.geometry)
        self._check_layers([layer])
        check_tensors(self.geometry, inputs.rows, q, weights, out)
        self._check_no_step()
        self._attachment = self._caretaker.exchange(self._attachment)
        if self._attachment is None:
            raise self.last_error or ServiceUnavailable(f"{self.settings.address}: not attached")
        self._steps += 1
        publish(self._attachment, self._steps, inputs)
        ordinal = self.geometry.layers.index(layer)
        stage_layer(self._attachment, self._steps, ordinal, q, weights)
        request(self._attachment, self._steps, ordinal)
        report = self._attachment.select_top_k(
            inputs.plan(self._steps, self._attachment.epoch, [layer])
        )
        if report.status != pb.STEP_STATUS_ANSWERED:
            raise ServiceUnavailable(f"step {self._steps}: {report.message}")
        out.copy_(answers(self._attachment, self._steps, inputs.rows))
        return report

    def _check_layers(self, layers: Sequence[int]) -> None:
        wanted, known = set(layers), set(self.geometry.layers)
        if not wanted or len(wanted) < len(layers) or wanted - known:
            raise ValueError(
                f"layers: {list(layers)} (fix: one or more of {sorted(known)}, each once)"
            )

    def _check_no_step(self) -> None:
        if self._step_is_open:
            raise RuntimeError(
                f"session: step {self._steps} is open (fix: leave its `with` block first)"
            )
