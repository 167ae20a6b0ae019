"""What a worker's session is wherever its data lies: an attachment that comes and goes, steps
that are counted, reports that are read."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from indexer_client.attachment import Attachment, AttachRequest
from indexer_client.caretaker import Caretaker
from indexer_client.errors import IndexerError, ServiceUnavailable
from indexer_client.inputs import StepInputs
from indexer_client.metrics import WorkerMetrics
from indexer_client.recording import Recorder
from indexer_client.reports import ReportReader
from indexer_client.statistics import Statistics
from indexer_client.step import Begun
from indexer_client.step_findings import WorkerFindings
from indexer_client.worker_traces import StampReader, WorkerTraces
from ipc_handoff.banks import BankPool
from ipc_handoff.detectors import Detection, detectors
from ipc_handoff.findings import Finding, FindingListener, FindingLog, Findings
from ipc_handoff.telemetry.metrics import Metrics


class WorkerSession:
    """A session never fails because of the service: it works inline until one is there, and
    again after that one is gone. Used by one thread; not after a fork.

    Args:
        request: how to attach. Its tracing is closed with the session.
        pool: where banks come from.
        stamps: of this side's stages, for traces; None: nothing is stamped.
        metrics: where metrics go; None: nowhere. Closed with the session.
        refusal: why no service is ever looked for; None: one is.
        prepare_thread: called first in every thread that attaches.
        findings: told of what the detectors find, besides the log.
    """

    def __init__(
        self,
        request: AttachRequest,
        pool: BankPool,
        stamps: StampReader | None,
        metrics: Metrics | None,
        refusal: IndexerError | None = None,
        prepare_thread: Callable[[], None] = lambda: None,
        findings: FindingListener | None = None,
    ) -> None:
        self.settings = request.settings
        self.geometry = request.geometry
        self._tracing = request.tracing
        self._traces: WorkerTraces | None = None
        if request.tracing is not None:
            self._traces = WorkerTraces(request.tracing, request.geometry, stamps)
        self._metrics: WorkerMetrics | None = None
        if metrics is not None:
            self._metrics = WorkerMetrics(metrics, self._count, self._traces)
        self._caretaker = Caretaker(request, pool, prepare_thread)
        self._refusal = refusal
        self._attachment: Attachment | None = None
        self._steps = 0
        self._statistics = Statistics()
        self._finding_log = FindingLog()
        told = (self._finding_log, self._metrics, self._traces, findings)
        self._listeners = Findings(*(listener for listener in told if listener is not None))
        detection = Detection(self._listeners, detectors(request.settings.detectors))
        self._findings = WorkerFindings(detection, request.geometry.layers)
        self._reports = ReportReader(self._statistics, self._findings)
        record = request.settings.record
        self._recorder = Recorder(record, self.geometry) if record is not None else None
        self._owner = os.getpid()

    def start(self) -> None:
        """Begin to look for a service. Once in a session's life; entering does it too."""
        self._check_process()
        if self._refusal is None:
            self._caretaker.start()

    def close(self) -> None:
        """End in good order; leaving the `with` block does it too. A second time does nothing."""
        self._check_process()
        self._caretaker.close(self._attachment)
        self._attachment = None
        if self._traces is not None:
            # What a service said at its end was still to come; its words are still mapped.
            self._traces.close()
        self._finding_log.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._tracing is not None:
            self._tracing.close()
        if self._metrics is not None:
            self._metrics.close()

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

    def _count(self) -> Statistics:
        return self.statistics

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
        return self._refusal or self._caretaker.last_error or self._reports.last_error

    def wait_attached(self, seconds: float) -> None:
        """Wait until the next step will have a service.

        Raises:
            IndexerError: why the last attempt failed.
        """
        if self._refusal is not None:
            raise self._refusal
        if not self._caretaker.wait_attached(seconds):
            raise self.last_error or ServiceUnavailable(
                f"{self.settings.address}: no answer within {seconds} s"
            )

    def found(self, finding: Finding) -> None:
        """Tell of a finding in one of this session's steps, as its own detectors do."""
        self._listeners.found(finding)

    def _record(self, inputs: StepInputs, layers: Sequence[int]) -> None:
        """Note a step for a replay, if that was asked for."""
        if self._recorder is not None:
            self._recorder.step(inputs, layers)

    def _next_step(self, inputs: StepInputs) -> Begun:
        """Number the next step, at its boundary, and give it what it has of its own."""
        self._attachment = self._caretaker.exchange(self._attachment)
        self._steps += 1
        self._findings.begin(self._steps, inputs)
        trace = None
        if self._traces is not None:
            trace = self._traces.begin(self._steps, inputs)
        return Begun(self._steps, self._attachment, trace)

    def _read_reports(self) -> None:
        if self._attachment is None:
            return
        try:
            for report in self._attachment.plans.reports():
                self._reports.read(report)
        except IndexerError as error:
            self._attachment.detach(str(error))

    def _check_process(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                "session: made before a fork (fix: make a new session in this process)"
            )
