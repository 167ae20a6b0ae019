"""Random contents of what a worker reads of its service: a broken one must not hurt an engine."""

import random
from collections import Counter

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.errors import IndexerError
from indexer_client.plan_channel import RingPlans
from indexer_client.reports import ReportReader
from indexer_client.statistics import Statistics
from indexer_client.step_findings import WorkerFindings
from ipc_handoff.banks import CONTROL, HostBank
from ipc_handoff.control import ServiceControl
from ipc_handoff.errors import RingFull
from ipc_handoff.wakeups import Wakeup
from tests.service.fuzz_words import scribble
from tests.service.mutations import mutate
from tests.service.support import GEOMETRY
from tests.service.tally import tally
from tests.support.findings import Kept

_EPOCH = 5
_STEPS_OF_A_SESSION = 60


class Reports:
    """A worker's control block, and a service that writes nonsense into it."""

    def __init__(self) -> None:
        self._wakeup = Wakeup()
        self._sent = 0
        self._counts: Counter[str] = Counter()
        self._bank = HostBank(GEOMETRY, 0)
        self._begin()

    def _begin(self) -> None:
        self._bank.start(_EPOCH)
        memory = self._bank.memories[CONTROL].view()
        self._service = ServiceControl(memory, GEOMETRY, _EPOCH)
        self._plans = RingPlans(self._bank.control, self._wakeup)
        self._found = Kept()
        findings = WorkerFindings(self._found.detection, GEOMETRY.layers)
        self._reader = ReportReader(Statistics(), findings)

    def send(self, chance: random.Random) -> None:
        self._sent += 1
        if self._sent % _STEPS_OF_A_SESSION == 0:
            self._begin()
        step = chance.randrange(1, 1000)
        if chance.randrange(3) == 0:
            scribble(self._bank.memories[CONTROL].view(), chance)
        else:
            self._report(step, chance)
        try:
            for report in self._plans.reports():
                self._reader.read(report)
                self._counts["reports read"] += 1
            self._counts["findings"] += len(self._found.findings)
            self._found.findings.clear()
            self._plans.post(pb.StepPlan(step=step, epoch=_EPOCH))
        except IndexerError:  # the one thing that makes a worker detach
            self._counts["detachments"] += 1
            self._begin()
        bells = self._bank.control.bells
        bells.is_exported(step)
        for look in (bells.progress, bells.is_drained):
            look()
        for layer in range(len(GEOMETRY.layers)):
            bells.is_done(layer, step)
        bells.is_cancelled(step)
        self._bank.control.service_stamps.read(step)

    def _report(self, step: int, chance: random.Random) -> None:
        """A report that the ring's checksum vouches for."""
        report = pb.StepReport(step=step, status=pb.STEP_STATUS_ANSWERED, message="all is well")
        reason = pb.ROW_FAULT_REASON_TORN_INPUT
        report.faults.add(row=1, request=1, expected=3, seen=4, reason=reason)
        for _ in range(chance.randrange(5)):
            mutate(report, chance)
        data = report.SerializeToString()
        if chance.randrange(4) == 0:
            data = chance.randbytes(chance.randrange(120))
        ring = self._service.reports
        try:
            ring.post(data[: ring.payload_bytes])
        except RingFull:
            self._begin()

    def close(self) -> None:
        self._bank.close()
        self._wakeup.close()

    def __str__(self) -> str:
        return tally(self._counts)
