"""Run a command on a machine that stands still now and then: all of its processes, or one.

    python tools/stall.py python -m pytest tests/e2e
    python tools/stall.py --thread python -m pytest tests/client

A test that holds here holds on a machine with other work. A process is stopped by a signal; with
`--thread`, which is for pytest only, a single thread of the tests' own process stands still while
the others go on (see `tests.support.stalled_threads`).
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

STANDS_STILL = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE}
_LOOK_SECONDS = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=float, default=4.0, help="seconds between them, mean")
    parser.add_argument("--least", type=float, default=1.5, help="seconds of the shortest")
    parser.add_argument("--most", type=float, default=2.5, help="seconds of the longest")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--thread", action="store_true", help="one thread of pytest's process")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if not asked.command:
        parser.error("command: none is given (fix: python -m pytest tests/e2e, for example)")
    chance = random.Random(asked.seed)
    bounds = (asked.every, asked.least, asked.most)
    if asked.thread:
        command = [*asked.command, "-p", "tests.support.stalled_threads"]
        told = " ".join(map(str, (*bounds, asked.seed)))
        return subprocess.run(command, env={**os.environ, "STALLED_THREADS": told}).returncode
    child = subprocess.Popen(asked.command)
    stalls = 0
    while _runs_on(child, chance.uniform(0, 2 * asked.every)):
        _stand_still(child.pid, chance, chance.uniform(asked.least, asked.most))
        stalls += 1
    print(f"stood still {stalls} times, seed {asked.seed}", file=sys.stderr)
    return child.wait()


def _runs_on(child: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Whether it still runs after so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and child.poll() is None:
        time.sleep(_LOOK_SECONDS)
    return child.poll() is None


def _stand_still(pid: int, chance: random.Random, seconds: float) -> None:
    """Stop the process and all below it, or one of them, unless a test has stopped it already."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        victims = [root, *root.children(recursive=True)]
        if chance.random() < 0.5:
            victims = [chance.choice(victims)]
        stopped = [process for process in victims if _signal(process, signal.SIGSTOP)]
        try:
            time.sleep(seconds)
        finally:  # after Ctrl-C, too: nobody else would wake them
            for process in stopped:
                _signal(process, signal.SIGCONT)


def _signal(process: psutil.Process, number: signal.Signals) -> bool:
    with suppress(psutil.NoSuchProcess):
        if number is signal.SIGCONT or process.status() not in STANDS_STILL:
            process.send_signal(number)
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
