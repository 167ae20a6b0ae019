"""How plans reach the service and reports come back: the ring (default) or the stream."""

import queue
import threading
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.control_plane import ControlPlane
from indexer_client.errors import IndexerError, ServiceUnavailable, from_rpc_error
from ipc_handoff.control import WorkerControl
from ipc_handoff.errors import HandoffError, RingFull
from ipc_handoff.layout import RING_CAPACITY
from ipc_handoff.wakeups import Wakeup


class PlanChannel(Protocol):
    """Never blocks."""

    def post(self, plan: pb.StepPlan) -> None:
        """Send a plan.

        Raises:
            IndexerError: the service does not take plans any more; detach.
        """

    def reports(self) -> list[pb.StepReport]:
        """The reports that have come since the last call.

        Raises:
            IndexerError: they cannot be read any more; detach.
        """

    def close(self) -> None: ...


class RingPlans:
    """Plans and reports through the control block's rings."""

    def __init__(self, control: WorkerControl, wake_service: Wakeup) -> None:
        self._control = control
        self._wake_service = wake_service

    def post(self, plan: pb.StepPlan) -> None:
        try:
            self._control.plans.post(plan.SerializeToString())
        except RingFull as error:
            raise ServiceUnavailable(f"plan ring: {error}") from error
        self._wake_service.ring()

    def reports(self) -> list[pb.StepReport]:
        found: list[pb.StepReport] = []
        try:
            while len(found) < RING_CAPACITY:
                payload = self._control.reports.take()
                if payload is None:
                    break
                found.append(pb.StepReport.FromString(payload))
        except (HandoffError, DecodeError) as error:
            raise ServiceUnavailable(f"report ring: {error}") from error
        return found

    def close(self) -> None:
        pass


class StreamPlans:
    """Plans and reports through the RunSteps stream."""

    def __init__(self, control_plane: ControlPlane, session_id: str) -> None:
        self._session_id = session_id
        self._outgoing: queue.SimpleQueue[pb.StepPlan | None] = queue.SimpleQueue()
        self._reports: deque[pb.StepReport] = deque()
        self._error: IndexerError | None = None
        self._call = control_plane.run_steps(self._requests())
        self._thread = threading.Thread(target=self._receive, name="reports", daemon=True)
        self._thread.start()

    def post(self, plan: pb.StepPlan) -> None:
        if self._error is not None:
            raise self._error
        self._outgoing.put(plan)

    def reports(self) -> list[pb.StepReport]:
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        self._thread.join()

    def _requests(self) -> Iterator[pb.RunStepsRequest]:
        while (plan := self._outgoing.get()) is not None:
            yield pb.RunStepsRequest(session_id=self._session_id, plan=plan)

    def _receive(self) -> None:
        try:
            for response in self._call:
                self._reports.append(response.report)
            self._error = ServiceUnavailable("the service ended the stream")
        except grpc.RpcError as error:
            self._error = from_rpc_error(error)
