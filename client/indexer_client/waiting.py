"""The wait for one layer's answer: bounded on progress, and it says how it ended."""

import time
from enum import Enum

from indexer_client.attachment import Attachment
from ipc_handoff.wakeups import sleep_until_any


class WaitEnd(Enum):
    """How a wait ended."""

    ANSWERED = "answered"
    CANCELLED = "the service gave the step up"
    STALLED = "no progress within the bound"
    ENDED = "the service has ended the session"
    SERVICE_DIED = "the service's process is dead"


def wait_for_answer(attachment: Attachment, layer: int, step: int, bound: float) -> WaitEnd:
    """Wait until layer ordinal `layer` of `step` is answered.

    Args:
        bound: seconds without progress of the service after which the wait ends.
    """
    bells = attachment.bells
    sleepers = [attachment.wake_worker.fileno()]
    process = attachment.watch.fileno()
    if process is not None:
        sleepers.append(process)
    progress, deadline = bells.progress(), time.monotonic() + bound
    while True:
        if bells.is_done(layer, step):
            return WaitEnd.ANSWERED
        if bells.is_cancelled(step):
            return WaitEnd.CANCELLED
        if bells.is_drained():
            return WaitEnd.ENDED
        now = time.monotonic()
        if bells.progress() != progress:
            progress, deadline = bells.progress(), now + bound
        if now >= deadline:
            return WaitEnd.STALLED
        awake = sleep_until_any(sleepers, deadline - now)
        attachment.wake_worker.clear()
        if process in awake:
            # It may have answered before it died.
            return WaitEnd.ANSWERED if bells.is_done(layer, step) else WaitEnd.SERVICE_DIED
