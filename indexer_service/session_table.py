"""All sessions of the service: opening, finding, replacing and ending them."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.agreement import Agreement, agree
from indexer_service.devices import ServiceDevice
from indexer_service.errors import (
    ServiceError,
    exhausted,
    not_found,
    precondition,
    shown,
    unauthenticated,
    unavailable,
)
from indexer_service.session_steps import StepResources
from indexer_service.sessions import Ending, Session
from indexer_service.settings import Settings
from ipc_handoff.descriptors import DescriptorServer

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
_REMEMBERED_ENDINGS = 1024
_EPOCH_BITS_BELOW_MILLISECONDS = 20
_OPEN_ANOTHER = "open a new session"


class SessionTable:
    """Lives on the event loop.

    Args:
        descriptors: the descriptor socket; None over TCP.
        device: that steps are computed on.

    Attributes:
        refusal: makes the error that OpenSession gets; None while sessions are accepted.
        stale_epochs: calls that were refused for their epoch.
    """

    def __init__(
        self,
        settings: Settings,
        resources: StepResources,
        descriptors: DescriptorServer | None,
        device: ServiceDevice,
    ) -> None:
        self._settings = settings
        self._resources = resources
        self._descriptors = descriptors
        self._device = device
        self._open: dict[str, Session] = {}
        self._releasing: set[Session] = set()
        self._endings: OrderedDict[str, Ending] = OrderedDict()
        # Unique over restarts (no service opens a million sessions a millisecond), and ascending
        # unless the host's clock went back.
        self._next_epoch = (time.time_ns() // 1_000_000) << _EPOCH_BITS_BELOW_MILLISECONDS
        self.stale_epochs = 0
        self._reaper = asyncio.create_task(self._look_after_sessions())
        self.refusal: Ending | None = partial(
            unavailable, "service", "is warming up", "wait until its health is SERVING"
        )

    @property
    def sessions(self) -> list[Session]:
        """Open ones, oldest first."""
        return list(self._open.values())

    @property
    def mapped_bytes(self) -> int:
        """Over all sessions, also those that are still being drained."""
        return sum(s.regions.mapped_bytes for s in (*self._open.values(), *self._releasing))

    async def open(self, request: pb.OpenSessionRequest) -> Session:
        """Start a session; one of the same worker and model is ended first.

        Raises:
            ServiceError: UNAVAILABLE while `refusal` is set, RESOURCE_EXHAUSTED at the limit of
                sessions, and as `Engine.check_session` and `agree`.
        """
        self._check_accepting()
        self._resources.engine.check_session()
        agreement = agree(
            request,
            self._resources.engine.configuration,
            device=self._device,
            has_host_memory=self._descriptors is not None,
            max_bank_bytes=self._settings.max_bank_bytes,
        )
        predecessor = next(
            (s for s in self._open.values() if s.agreement.identity == agreement.identity), None
        )
        others = [s for s in self._open.values() if s is not predecessor]
        _check_group(agreement, others)
        if len(others) >= self._settings.max_sessions:
            raise exhausted(
                "session",
                f"{len(others)} sessions are open",
                "close one, or raise max_sessions",
            )
        session = Session(
            agreement,
            self._take_epoch(),
            self._settings.lease_seconds,
            self._resources,
            self._descriptors,
            self._worker_gone,
        )
        self._open[session.id] = session
        if predecessor is not None:
            ending = partial(
                self._stale,
                "epoch",
                f"{predecessor.epoch} is stale, the worker's newer session has {session.epoch}",
                "use the newer session",
            )
            await self.end(predecessor, ending, "replaced by the same worker")
        logger.info("epoch %d: opened for %s", session.epoch, shown(agreement.worker.engine))
        return session

    def get(self, session_id: str, epoch: int, field: str = "epoch") -> Session:
        """The open session of a call; renews its lease.

        Args:
            field: name of the epoch's field in the request.

        Raises:
            ServiceError: NOT_FOUND, UNAUTHENTICATED or FAILED_PRECONDITION.
        """
        session = self._open.get(session_id)
        if session is None:
            ending = self._endings.get(session_id)
            if ending is not None:
                raise ending()
            raise not_found("session_id", f"{shown(session_id)} is unknown", _OPEN_ANOTHER)
        if not session.lease_remaining:
            self._lease_ran_out(session)
            raise session.ended.result()()
        if epoch != session.epoch:
            raise self._stale(
                field, f"{epoch}, the session's is {session.epoch}", "the epoch of OpenSession"
            )
        session.renew()
        return session

    async def close(self, session: Session) -> int:
        """End a session at its worker's wish; how many steps that cancelled."""
        ending = partial(not_found, "session_id", "the session is closed", _OPEN_ANOTHER)
        return await self.end(session, ending, "closed")

    def end(
        self, session: Session, ending: Ending, why: str, *, finish: bool = False
    ) -> "asyncio.Future[int]":
        """End a session; the future's result: how many steps that cancelled."""
        if self._open.pop(session.id, None) is not None:
            logger.info("epoch %d: ends: %s", session.epoch, why)
            self._releasing.add(session)
            self._endings[session.id] = ending
            while len(self._endings) > _REMEMBERED_ENDINGS:
                self._endings.popitem(last=False)
        task = session.end(ending, finish=finish)
        task.add_done_callback(lambda _: self._releasing.discard(session))
        return asyncio.shield(task)

    async def shut(self, grace_seconds: float) -> None:
        """Open no more sessions; answer the steps that have arrived; end every session.

        Returns within `grace_seconds`, and a little for unmapping.
        """
        self.refusal = partial(unavailable, "service", "is shutting down", "try its successor")
        # Those that end already, too: a thread that still unmaps at the interpreter's end crashes.
        ends: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(session.released()) for session in self._releasing
        ]
        for session in self.sessions:
            ending = partial(unavailable, "service", "is shutting down", _OPEN_ANOTHER)
            ends.append(self.end(session, ending, "shutting down", finish=True))
        if ends:
            _, late = await asyncio.wait(ends, timeout=grace_seconds / 2)
            if late:
                logger.warning("%d sessions still run steps: cancelling them", len(late))
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace_seconds / 4):
                        await asyncio.gather(*(session.hurry() for session in self._releasing))
                        await asyncio.gather(*late)
        self._reaper.cancel()
        with suppress(asyncio.CancelledError):
            await self._reaper

    def _check_accepting(self) -> None:
        if self.refusal is not None:
            raise self.refusal()

    def _stale(self, field: str, problem: str, fix: str) -> ServiceError:
        self.stale_epochs += 1
        return precondition(field, problem, fix)

    def _take_epoch(self) -> int:
        self._next_epoch += 1
        return self._next_epoch

    def _worker_gone(self, session: Session) -> None:
        ending = partial(
            not_found, "session_id", "its worker's descriptor connection ended", _OPEN_ANOTHER
        )
        self.end(session, ending, "its worker is gone")

    def _lease_ran_out(self, session: Session) -> None:
        ending = partial(
            unauthenticated,
            "session_id",
            f"the lease of {session.lease_seconds} s ran out",
            f"{_OPEN_ANOTHER}, and call KeepAlive in time",
        )
        self.end(session, ending, "its lease ran out")

    async def _look_after_sessions(self) -> None:
        while True:
            for session in self.sessions:
                try:
                    if session.lease_remaining:
                        session.look_after()
                    else:
                        self._lease_ran_out(session)
                except Exception:
                    logger.exception("epoch %d: looking after it failed", session.epoch)
            await asyncio.sleep(_LOOK_SECONDS)


def _check_group(agreement: Agreement, others: Iterable[Session]) -> None:
    """Ranks of a group must select the same bits: one shape, and (one service) one engine."""
    if not agreement.worker.HasField("group"):
        return
    group = agreement.worker.group
    for other in others:
        theirs = other.agreement
        if (
            not theirs.worker.HasField("group")
            or theirs.worker.group.name != group.name
            or theirs.worker.model != agreement.worker.model
        ):
            continue
        if theirs.worker.group.size != group.size:
            raise precondition(
                "worker.group.size",
                f"{group.size}, other ranks of {shown(group.name)} say {theirs.worker.group.size}",
                "the same size on all ranks",
            )
        if theirs.worker.group.rank == group.rank:
            raise precondition(
                "worker.group.rank",
                f"{group.rank} of {shown(group.name)} has a session of another worker",
                "one worker a rank, or close the other session",
            )
        if theirs.geometry != agreement.geometry:
            raise precondition(
                "geometry",
                f"differs from that of the other ranks of {shown(group.name)}",
                "the same geometry and slots on all ranks",
            )
