"""One session: its terms, its lease, its memory and steps, and how it ends.

Methods run on the event loop, which is what keeps them apart; what blocks (mapping, draining)
runs beside it, one piece of work at a time a session.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.agreement import Agreement
from indexer_service.errors import ServiceError
from indexer_service.plan_queue import OnReport
from indexer_service.session_regions import SessionRegions, device_terms
from indexer_service.session_steps import SessionSteps, StepResources
from indexer_service.threads import in_thread
from ipc_handoff.descriptors import NONCE_BYTES, DescriptorServer, Inbox
from ipc_handoff.errors import RegionError
from ipc_handoff.processes import ProcessWatch

logger = logging.getLogger(__name__)

# Makes the error that calls of an ended session get.
Ending = Callable[[], ServiceError]


class Session:
    """Made by `SessionTable.open`.

    Args:
        descriptors: where the worker's descriptors arrive; None over TCP.
        on_gone: called on the event loop when the worker is known to have gone.

    Attributes:
        nonce: binds a connection of the descriptor socket to this session; empty over TCP.
        ended: done as soon as the session takes no more calls.
    """

    def __init__(
        self,
        agreement: Agreement,
        epoch: int,
        lease_seconds: float,
        resources: StepResources,
        descriptors: DescriptorServer | None,
        on_gone: Callable[["Session"], None],
    ) -> None:
        self.id = secrets.token_urlsafe(18)
        self.epoch = epoch
        self.agreement = agreement
        self.lease_seconds = lease_seconds
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._on_gone = on_gone
        self._descriptors = descriptors
        self.nonce = b"" if descriptors is None else secrets.token_bytes(NONCE_BYTES)
        self._inbox = None if descriptors is None else self._expect_worker(descriptors)
        self.regions = SessionRegions(
            agreement.geometry, epoch, self._inbox, device_terms(agreement)
        )
        self._steps = SessionSteps(
            resources,
            self.regions,
            agreement.geometry,
            epoch,
            self._inbox,
            use_ring=agreement.signalling == pb.SIGNALLING_RING,
            placement=agreement.placement,
        )
        self._watch: ProcessWatch | None = None
        self._lock = asyncio.Lock()
        self._release_task: asyncio.Task[int] | None = None
        self.renew()

    def renew(self) -> None:
        """Start the lease again."""
        self._deadline = time.monotonic() + self.lease_seconds

    @property
    def lease_remaining(self) -> float:
        """Seconds; 0 once it ran out."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def queued_steps(self) -> int:
        """Submitted plans that were not taken yet."""
        return self._steps.counts.queued

    async def register(self, regions: Sequence[pb.Region]) -> None:
        """Map and check all of `regions`, or none; with the last of the bank, steps can run.

        Then it returns once the first step would be answered without delay.

        Whatever fails, the descriptors that the regions name are closed, and must be sent again.

        Raises:
            ServiceError, HandoffError: see `SessionRegions.register`.
        """

        def work() -> None:
            try:
                self._steps.check_can_register(regions)
                self._steps.collect_wakeups()
                self.regions.register(regions)
            except BaseException:
                self.regions.drop_descriptors(regions)
                raise
            self._steps.start_if_complete()

        async with self._lock:
            self._check_open()
            await in_thread(work)
        # Without the lock: an end of the session interrupts it.
        await in_thread(self._steps.wait_until_ready)

    async def unregister(self, names: Sequence[str]) -> None:
        """Give back all of `names`, or none, once the running step has ended.

        A region of the bank ends the attachment: its steps are cancelled and none runs after it.

        Raises:
            ServiceError: NOT_FOUND.
        """
        async with self._lock:
            self._check_open()
            await in_thread(lambda: self._steps.unregister(names))

    def submit(self, plan: pb.StepPlan, on_report: OnReport) -> None:
        """Queue a plan; `on_report` is called once, from the runner's thread.

        Raises:
            ServiceError: see `SessionSteps.submit`.
            RegionError: a descriptor sent as eventfd is none.
        """
        if not self._lock.locked():
            self._steps.start_if_complete()
        self._steps.submit(plan, on_report)

    def look_after(self) -> None:
        """Called a few times a second: notice what arrived outside of calls."""
        if self._lock.locked() or self.ended.done():
            return
        try:
            self._steps.start_if_complete()
        except RegionError as error:
            logger.warning("session of epoch %d: %s", self.epoch, error)
        if self._watch is None and self._inbox is not None and self._inbox.peer is not None:
            self._watch_worker(self._inbox.peer.pid)

    def end(self, ending: Ending, *, finish: bool = False) -> "asyncio.Task[int]":
        """Take no more calls, drain, unmap. The task's result: how many steps that cancelled.

        Args:
            ending: what later calls get. The first end counts.
            finish: run the steps whose plans have arrived, instead of cancelling them.
        """
        if self._release_task is None:
            self.ended.set_result(ending)
            self._stop_watching()
            self._release_task = asyncio.create_task(self._release(finish))
        return self._release_task

    async def released(self) -> None:
        """Wait until an ended session's steps have reported and its memory is unmapped."""
        if self._release_task is not None:
            await asyncio.shield(self._release_task)

    async def hurry(self) -> None:
        """Cancel the steps that an end with `finish` still runs."""
        await in_thread(self._steps.hurry)

    def status(self) -> pb.SessionStatus:
        """The session as GetStatus shows it."""
        counts = self._steps.counts
        worker = pb.Worker()
        worker.CopyFrom(self.agreement.worker)
        worker.ClearField("instance")
        return pb.SessionStatus(
            epoch=self.epoch,
            worker=worker,
            placement=self.agreement.placement,
            signalling=self.agreement.signalling,
            configuration=self.agreement.configuration,
            lease_remaining_seconds=self.lease_remaining,
            regions=self.regions.names,
            mapped_bytes=self.regions.mapped_bytes,
            queued_steps=counts.queued,
            last_step=counts.last_step,
            answered_steps=counts.answered,
            cancelled_steps=counts.cancelled,
            faulted_rows=counts.faulted_rows,
            lost_reports=counts.lost_reports,
            lost_stamps=counts.lost_stamps,
        )

    def _check_open(self) -> None:
        """A call may have waited for the lock while the session ended."""
        if self.ended.done():
            raise self.ended.result()()

    async def _release(self, finish: bool) -> int:
        async with self._lock:
            try:
                return await in_thread(lambda: self._drain_and_unmap(finish))
            except Exception:
                logger.exception("session of epoch %d did not end cleanly", self.epoch)
                return 0

    def _drain_and_unmap(self, finish: bool) -> int:
        try:
            return self._steps.close(finish=finish)
        finally:
            self.regions.close()
            if self._descriptors is not None:
                self._descriptors.forget(self.nonce)

    def _expect_worker(self, descriptors: DescriptorServer) -> Inbox:
        loop = asyncio.get_running_loop()

        def gone() -> None:
            with suppress(RuntimeError):  # the loop has ended, and every session with it
                loop.call_soon_threadsafe(self._on_gone, self)

        return descriptors.expect(self.nonce, gone)

    def _watch_worker(self, pid: int) -> None:
        self._watch = ProcessWatch(pid)
        descriptor = self._watch.fileno()
        if descriptor is not None:
            asyncio.get_running_loop().add_reader(descriptor, self._on_gone, self)
        elif self._watch.is_dead():
            self._on_gone(self)

    def _stop_watching(self) -> None:
        if self._watch is None:
            return
        if (descriptor := self._watch.fileno()) is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
        self._watch.close()
