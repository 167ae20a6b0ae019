"""What the service reports of steps: counted, found, and told once a message, not too often."""

import logging
import time

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.errors import IndexerError, from_status
from indexer_client.statistics import Statistics
from indexer_client.step_findings import WorkerFindings

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 1.0
_REMEMBERED = 256
_REFUSED = (pb.STEP_STATUS_REJECTED, pb.STEP_STATUS_FAILED)


class ReportReader:
    """Takes reports from any service, also a broken one: raises nothing.

    Args:
        findings: are told of rows that the service did not trust.

    Attributes:
        last_error: why the newest step that the service did not work on was refused; None
            after it answered one.
    """

    def __init__(self, statistics: Statistics, findings: WorkerFindings) -> None:
        self._findings = findings
        self._statistics = statistics
        self._told: set[str] = set()
        self._quiet_until = 0.0
        self.last_error: IndexerError | None = None

    def read(self, report: pb.StepReport) -> None:
        self._statistics.faulted_rows += report.fault_count
        self._statistics.rejected_steps += report.status == pb.STEP_STATUS_REJECTED
        if report.status in _REFUSED:
            self.last_error = from_status(report.code, report.message)
            self._tell(report.message, f"step {report.step}: refused, inline: {report.message}")
        elif report.status == pb.STEP_STATUS_ANSWERED:
            self.last_error = None
        self._findings.report(report)

    def _tell(self, key: str, line: str) -> None:
        """Log a line unless its like was logged; others must wait a moment for each other."""
        now = time.monotonic()
        if key in self._told or now < self._quiet_until:
            return
        if len(self._told) == _REMEMBERED:
            self._told.clear()
        self._told.add(key)
        self._quiet_until = now + _QUIET_SECONDS
        logger.warning("%s", line)
