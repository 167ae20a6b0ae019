"""A plugin for pytest: now and then one thread of its process stands still, and the others go on.

Loaded by `tools/stall.py --thread`. A thread stands still where it next calls a function, with
whatever it holds there.
"""

import os
import random
import sys
import threading
import time
from types import FrameType
from typing import Any

# A thread that sleeps is passed over after so long.
_PATIENCE_SECONDS = 0.2


class Stalls:
    """Args: as `tools/stall.py` has them."""

    def __init__(self, every: float, least: float, most: float, seed: int) -> None:
        self._every, self._least, self._most = every, least, most
        self._chance = random.Random(seed)
        self._victim: int | None = None
        self.count = 0

    def start(self) -> None:
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        threading.Thread(target=self._choose, daemon=True).start()

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _look(self, _frame: FrameType, _event: str, _argument: Any) -> None:
        if self._victim == threading.get_ident():
            self._victim = None
            self.count += 1
            time.sleep(self._chance.uniform(self._least, self._most))

    def _choose(self) -> None:
        own = threading.get_ident()
        while True:
            time.sleep(self._chance.uniform(0, 2 * self._every))
            before = self.count
            while self.count == before:
                others = [t.ident for t in threading.enumerate() if t.ident != own]
                self._victim = self._chance.choice(others)
                time.sleep(_PATIENCE_SECONDS)


_made: list[Stalls] = []


def pytest_configure() -> None:
    every, least, most, seed = os.environ["STALLED_THREADS"].split()
    _made.append(Stalls(float(every), float(least), float(most), int(seed)))
    _made[0].start()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    _made[0].stop()
    terminalreporter.write_line(f"{_made[0].count} threads stood still")
