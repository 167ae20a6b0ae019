"""The plans that wait for an attachment's runner: submitted ones, and those in the ring."""

import logging
from collections import deque
from collections.abc import Callable, Iterator

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.errors import exhausted
from ipc_handoff.errors import RingLapped
from ipc_handoff.ring import RingConsumer

logger = logging.getLogger(__name__)

OnReport = Callable[[pb.StepReport], None]
Plan = tuple[pb.StepPlan, OnReport | None]
"""With who gets its report; None: it came through the ring."""


class PlanQueue:
    """Any thread may `submit`; one takes.

    Args:
        ring: the attachment's, if plans come through it.
        most: plans that may wait; those in the ring are not counted.
    """

    def __init__(self, ring: RingConsumer | None, most: int, epoch: int) -> None:
        self._ring = ring
        self._most = most
        self._epoch = epoch
        self._submitted: deque[tuple[pb.StepPlan, OnReport]] = deque()

    @property
    def submitted(self) -> int:
        """Submitted plans that were not taken yet."""
        return len(self._submitted)

    def submit(self, plan: pb.StepPlan, on_report: OnReport) -> None:
        """
        Raises:
            ServiceError: RESOURCE_EXHAUSTED with too many plans waiting.
        """
        if len(self._submitted) >= self._most:
            raise exhausted(
                "plan", f"{len(self._submitted)} plans are waiting", "wait for their reports"
            )
        self._submitted.append((plan, on_report))

    def next(self) -> Plan | None:
        """The next plan, if there is one.

        Raises:
            RingLapped: the ring is broken.
        """
        if self._submitted:
            return self._submitted.popleft()
        payload = self._take()
        while payload is not None:
            plan = self._parse(payload)
            if plan is not None:
                return plan, None
            payload = self._take()
        return None

    def take_all(self) -> Iterator[Plan]:
        """All that wait; nobody may submit any more. Of the ring, which its worker may go on
        writing, as many as it holds.
        """
        while self._submitted:
            yield self._submitted.popleft()
        for _ in range(0 if self._ring is None else self._ring.capacity):
            try:
                payload = self._take()
            except RingLapped:
                return
            if payload is None:
                return
            plan = self._parse(payload)
            if plan is not None:
                yield plan, None

    def _take(self) -> bytes | None:
        return None if self._ring is None else self._ring.take()

    def _parse(self, payload: bytes) -> pb.StepPlan | None:
        try:
            return pb.StepPlan.FromString(payload)
        except Exception:
            # The checksum held, so the worker wrote this: its wait ends by its bound.
            logger.exception("epoch %d: a plan that cannot be parsed", self._epoch)
            return None
