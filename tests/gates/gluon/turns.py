"""Partitions of a program run in turns: each until it waits for what another one has to do."""

import threading
from collections.abc import Callable, Sequence

_SECONDS = 120


class Deadlock(AssertionError):
    """Everybody waits."""


class _Abandoned(BaseException):
    """Ends a partition's thread when another one has failed."""


class _Part:
    def __init__(self, turns: "Turns", name: str, work: Callable[[], None]) -> None:
        self.name = name
        self.go = threading.Semaphore(0)
        self.waits_for: tuple[str, Callable[[], bool]] | None = None
        self.error: BaseException | None = None
        self.done = self.abandoned = False
        self._turns, self._work = turns, work
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self.go.acquire()
        try:
            if not self.abandoned:
                self._work()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._turns.back.release()

    def can_go_on(self) -> bool:
        return not self.done and (self.waits_for is None or self.waits_for[1]())


class Turns:
    """Who of a program's partitions runs now."""

    def __init__(self) -> None:
        self.back = threading.Semaphore(0)
        self._parts: list[_Part] = []
        self._running: _Part | None = None

    def wait(self, what: Callable[[], str], passed: Callable[[], bool]) -> None:
        """Return when `passed`, letting the others run meanwhile.

        Raises:
            Deadlock: nobody else can make it pass.
        """
        if passed():
            return
        part = self._running
        if part is None:
            raise Deadlock(f"nobody is left to complete {what()}")
        part.waits_for = what(), passed
        self.back.release()
        part.go.acquire()
        part.waits_for = None
        if part.abandoned:
            raise _Abandoned

    def run(
        self, work: Sequence[tuple[str, Callable[[], None]]], chosen: Callable[[int], None]
    ) -> None:
        """Run partitions to their end; `chosen` is told whose turn it is.

        Raises:
            Deadlock: all that are left wait.
        """
        parts = self._parts = [_Part(self, *one) for one in work]
        for part in parts:
            part.thread.start()
        try:
            while not all(part.done for part in parts):
                ready = [i for i, part in enumerate(parts) if part.can_go_on()]
                if not ready:
                    waits = [f"{p.name}: {p.waits_for[0]}" for p in parts if p.waits_for]
                    raise Deadlock("everybody waits: " + "; ".join(waits))
                for i in ready:
                    if parts[i].can_go_on():
                        self._turn(parts[i], i, chosen)
        finally:
            self._running = None
            for part in parts:
                if not part.done:
                    part.abandoned = True
                    part.go.release()
                    part.thread.join(_SECONDS)

    def _turn(self, part: _Part, number: int, chosen: Callable[[int], None]) -> None:
        chosen(number)
        self._running = part
        part.go.release()
        self.back.acquire()
        if part.error is not None:
            raise part.error
