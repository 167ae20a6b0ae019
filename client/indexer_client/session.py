"""The worker's session with an indexer service that may come and go."""

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.attachment import Attachment, AttachRequest, worker_identity
from indexer_client.caretaker import Caretaker
from indexer_client.control_plane import check_tls
from indexer_client.errors import IndexerError, ServiceUnavailable
from indexer_client.inputs import Fallback, StepInputs
from indexer_client.reports import ReportReader
from indexer_client.settings import ClientSettings
from indexer_client.staging import answers, check_tensors, publish, request, stage_layer
from indexer_client.statistics import Statistics
from indexer_client.step import Begun, Step
from ipc_handoff.banks import BankPool, HostBank
from ipc_handoff.layout import STAMPED_STEPS, HandoffGeometry
from ipc_handoff.regions import SharedTensor
from ipc_handoff.stages import WORKER_STAGES
from ipc_handoff.stamps import StampRing
from ipc_handoff.tracing import Tracing
from ipc_handoff.tracing import start as start_tracing


class Session:
    """Steps whose selections come from the service, or from the fallback while there is none.

    A session never fails because of the service: it works inline until one is there, and
    again after that one is gone. Used by one thread; not after a fork.

    Args:
        geometry: the indexer's shape and limits.
        k_caches: layer id -> uint8 [pages, page_size, head_dim + 4] in shared memory.
        fallback: computes a layer inline.
        settings: address, bounds; from `DSA_INDEXER_*` by default.
        engine_name, model: for people and for telling a worker's models apart.
        tracing: where spans go; by default what the settings say. Closed with the session.
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
    ) -> None:
        self.settings = settings or ClientSettings()
        check_tls(self.settings)
        self.geometry = geometry
        missing = set(geometry.layers) - set(k_caches)
        if missing:
            raise ValueError(f"k_caches: layer {min(missing)} is missing (fix: one a layer)")
        self._fallback = fallback
        configuration = getattr(fallback, "configuration", None)
        self._tracing = tracing or start_tracing(self.settings.tracing)
        request = AttachRequest(
            settings=self.settings,
            worker=worker_identity(str(uuid.uuid4()), model, engine_name),
            geometry=geometry,
            k_caches=k_caches,
            configuration_hash=configuration.hash if configuration is not None else "",
            tracing=self._tracing,
        )
        self._caretaker = Caretaker(
            request, BankPool(partial(HostBank, geometry), self.settings.banks)
        )
        self._private = torch.empty(geometry.max_rows, geometry.top_k, dtype=torch.int32)
        self._stamps = StampRing.private(STAMPED_STEPS, len(geometry.layers), len(WORKER_STAGES))
        self._attachment: Attachment | None = None
        self._steps, self._step_is_open = 0, False
        self._statistics = Statistics()
        self._reports = ReportReader(self._statistics)
        self._owner = os.getpid()

    def start(self) -> None:
        """Begin to look for a service. Once in a session's life; entering does it too."""
        self._check_process()
        self._caretaker.start()

    def close(self) -> None:
        """End in good order; leaving the `with` block does it too. A second time does nothing."""
        self._check_process()
        self._caretaker.close(self._attachment)
        self._attachment = None
        if self._tracing is not None:
            self._tracing.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def statistics(self) -> Statistics:
        self._statistics.attachments = self._caretaker.attachments
        self._statistics.detachments = self._caretaker.detachments
        lost = self._statistics.lost_stamps + self._caretaker.lost_stamps
        return replace(self._statistics, lost_stamps=lost)

    @property
    def epoch(self) -> int | None:
        """Of the attachment that the last step used; None while working inline."""
        return self._attachment.epoch if self._attachment is not None else None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the service has its engine, placement and signalling; () while there is none."""
        return self._caretaker.reasons

    @property
    def last_error(self) -> IndexerError | None:
        """Why the service is not used: it cannot be had, or refused the last step; None after
        a success."""
        return self._caretaker.last_error or self._reports.last_error

    def wait_attached(self, seconds: float) -> None:
        """Wait until the next step will have a service.

        Raises:
            IndexerError: why the last attempt failed.
        """
        if not self._caretaker.wait_attached(seconds):
            raise self.last_error or ServiceUnavailable(
                f"{self.settings.address}: no answer within {seconds} s"
            )

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
        return Step(
            inputs=inputs,
            layers=layers,
            geometry=self.geometry,
            fallback=self._fallback,
            private=self._private,
            stamps=self._stamps,
            statistics=self._statistics,
            wait_bound=self.settings.wait_bound_seconds,
            begin=partial(self._begin_step, inputs.rows),
            on_end=self._end_step,
        )

    def _begin_step(self, rows: int) -> Begun:
        self._check_process()
        self._check_no_step()
        self._attachment = self._caretaker.exchange(self._attachment)
        self._steps += 1
        trace = None
        if self._tracing is not None:
            trace = self._tracing.begin_step({"dsa.step": self._steps, "dsa.rows": rows})
        self._step_is_open = True
        return Begun(self._steps, self._attachment, trace)

    def _end_step(self) -> None:
        self._step_is_open = False
        self._read_reports()

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
        stage_layer(self._attachment, self._steps, q, weights)
        request(self._attachment, self._steps, self.geometry.layers.index(layer))
        report = self._attachment.select_top_k(
            inputs.plan(self._steps, self._attachment.epoch, [layer])
        )
        if report.status != pb.STEP_STATUS_ANSWERED:
            raise ServiceUnavailable(f"step {self._steps}: {report.message}")
        out.copy_(answers(self._attachment, self._steps, inputs.rows))
        return report

    def _read_reports(self) -> None:
        if self._attachment is None:
            return
        try:
            for report in self._attachment.plans.reports():
                self._reports.read(report)
        except IndexerError as error:
            self._attachment.detach(str(error))

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

    def _check_process(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                "session: made before a fork (fix: make a new session in this process)"
            )
