"""Everything about attachments that must not happen on the hot path.

A thread that attaches (again and again until a service is there), keeps the lease, and lets
go of ended attachments. The step thread and this one meet in `exchange`, at step boundaries.
"""

import logging
import threading
import time
from collections.abc import Callable

from indexer_client.attachment import Attachment, AttachRequest
from indexer_client.errors import SESSION_LOST, AttachRefused, IndexerError
from ipc_handoff.banks import Bank, BankPool

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.05
# An idle worker looks this often whether its service is still there.
_LOOK_SECONDS = 0.25
# A lease that could not be renewed is tried again so soon.
_RETRY_SECONDS = 0.25


class Caretaker:
    """Args:
    request: how to attach.
    pool: where banks come from; used by this thread only, once it runs.
    prepare_thread: called first in that thread.
    """

    def __init__(
        self,
        request: AttachRequest,
        pool: BankPool,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._request = request
        self._pool = pool
        self._prepare_thread = prepare_thread
        self._condition = threading.Condition()
        self._ready: Attachment | None = None
        self._in_use: Attachment | None = None
        self._lost_because = ""
        self._ended: list[Attachment] = []
        self._closing = False
        self.attachments = self.detachments = self.lost_stamps = 0
        self.last_error: IndexerError | None = None
        self._thread = threading.Thread(target=self._run, name="dsa-caretaker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def exchange(self, current: Attachment | None) -> Attachment | None:
        """At a step boundary: give up `current` if it has ended, get the next one if ready."""
        with self._condition:
            if current is not None and self._lost_because:
                current.detach(self._lost_because)
            if current is not None and current.detached_because:
                self._ended.append(current)
                current = self._in_use = None
                self._lost_because = ""
                self._condition.notify_all()
            if current is None and self._ready is not None:
                current = self._in_use = self._ready
                self._ready = None
            return current

    def wait_attached(self, seconds: float) -> bool:
        """Wait until there is an attachment for the next step."""
        with self._condition:
            return self._condition.wait_for(lambda: self._held() is not None, seconds)

    @property
    def reasons(self) -> tuple[str, ...]:
        held = self._held()
        return held.reasons if held is not None else ()

    def _held(self) -> Attachment | None:
        """The attachment that the next step will use."""
        with self._condition:  # reentrant
            if self._ready is not None:
                return self._ready
            if self._in_use is None or self._in_use.detached_because or self._lost_because:
                return None
            return self._in_use

    def _detached(self) -> None:
        with self._condition:
            self.detachments += 1
            self._condition.notify_all()

    def _stamps_lost(self, steps: int) -> None:
        self.lost_stamps += steps

    def close(self, current: Attachment | None) -> None:
        """End the thread and every attachment."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        self._release_ended()
        for attachment in (current, self._ready):
            if attachment is None:
                continue
            if attachment.detached_because:
                attachment.release(self._pool)
            else:
                attachment.close(self._pool)
        # They call this object back: in a circle they would keep their banks mapped.
        self._ready = self._in_use = None
        self._pool.close()

    def _run(self) -> None:
        self._prepare_thread()
        pause = _FIRST_PAUSE
        while not self._closing:
            self._release_ended()
            held = self._held()
            if held is not None:
                renew_in = held.lease_seconds / 3
                self._watch(held, renew_in if self._keep(held) else min(renew_in, _RETRY_SECONDS))
                pause = _FIRST_PAUSE
            elif not self._attach():
                self._sleep(pause)
                pause = min(2 * pause, self._request.settings.reattach_seconds)

    def _sleep(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Sleep, but not over an ended attachment, the end, or `until`."""
        with self._condition:
            self._condition.wait_for(lambda: self._closing or bool(self._ended) or until(), seconds)

    def _release_ended(self) -> None:
        with self._condition:
            ended, self._ended = self._ended, []
        for attachment in ended:
            attachment.release(self._pool)

    def _attach(self) -> bool:
        bank = self._pool.take()
        if bank is None:
            self._note(AttachRefused("banks: all may still be written by earlier services"))
            return False
        began = time.monotonic()
        try:
            attachment = self._opened(bank)
        except IndexerError as error:
            self._note(error)
            return False
        except Exception as error:
            # Without this thread the worker would stay inline for good, and not say why.
            logger.exception("attaching failed")
            self._note(AttachRefused(f"attaching failed: {error!r}"))
            return False
        with self._condition:
            self._ready = attachment
            self.attachments += 1
            self.last_error = None
            self._condition.notify_all()
        logger.info("epoch %d: attached in %.3f s", attachment.epoch, time.monotonic() - began)
        return True

    def _opened(self, bank: Bank) -> Attachment:
        try:
            attachment = Attachment(self._request, bank, self._detached, self._stamps_lost)
        except BaseException:
            self._pool.give_back(bank)
            raise
        try:
            attachment.open(is_wanted=lambda: not self._closing)
        except BaseException:
            attachment.release(self._pool)
            raise
        return attachment

    def _note(self, error: IndexerError) -> None:
        if str(error) != str(self.last_error):
            logger.warning("not attached, working inline: %s", error)
        self.last_error = error

    def _watch(self, held: Attachment, seconds: float) -> None:
        """Until the lease must be renewed or the attachment is over."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._held() is held:
            self._sleep(min(left, _LOOK_SECONDS), until=lambda: self._held() is not held)
            if held.watch.is_dead():
                self._lose(held, "the service's process is dead")
            if self._closing or self._ended:
                return

    def _keep(self, held: Attachment) -> bool:
        """Renew the lease; False: it was not, or nobody knows."""
        try:
            held.keep_alive()
            return True
        except SESSION_LOST as error:
            self._lose(held, str(error))
        except IndexerError as error:
            # Silence is not proof: waits find out whether it still answers.
            logger.info("epoch %d: keep-alive: %s", held.epoch, error)
            if held.watch.is_dead():
                self._lose(held, "the service's process is dead")
        return False

    def _lose(self, held: Attachment, reason: str) -> None:
        with self._condition:
            if held is self._ready:
                self._ready = None
                held.detach(reason)
                self._ended.append(held)
            elif held is self._in_use:
                self._lost_because = reason
