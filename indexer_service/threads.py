"""Blocking work beside the event loop, and a thread's sleep until somebody rings."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from ipc_handoff.wakeups import Wakeup, sleep_until_any

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread of its own and return what it returns.

    Not `asyncio.to_thread`: its pool is small, so that a few sessions that drain slowly would
    hold up all others, and it is joined at exit, beyond any grace.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop has ended; nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="blocking", daemon=True).start()
    return await future


def sleep_until_rung(wakeups: Sequence[Wakeup], seconds: float) -> None:
    """Sleep until somebody rings. Callers test their condition again afterwards."""
    sleep_until_any([wakeup.fileno() for wakeup in wakeups], seconds)
    for wakeup in wakeups:
        wakeup.clear()
