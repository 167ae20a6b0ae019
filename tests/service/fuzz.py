"""Random inputs for everything that a worker, or a service, may write to the other side.

    python -m tests.service.fuzz --inputs 100000 [--seed 1] [--only rpc words packets reports]

An input is made from the seed and its number alone. The service runs in this process: what kills
it ends the run. Shown is the number of the first input after which something was wrong.

| surface | an input |
|---|---|
| `rpc` | a request of any call: mutated, garbage, or with flipped bits |
| `words` | a worker's shared memory: words and bytes anywhere in it, plans with a right checksum |
| `packets` | the descriptor socket: packets of a stranger, and of a worker |
| `reports` | what a worker reads of its service: as `words`, reports with a right checksum |
"""

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch

from indexer_service.settings import Settings
from tests.service.fuzz_packets import Packets
from tests.service.fuzz_reports import Reports
from tests.service.fuzz_words import SharedWords
from tests.service.support import LocalService, Worker, running
from tests.service.tally import tally
from tests.service.victim import CALLS, KINDS, MOST_MUTATIONS, Victim
from tests.support.waiting import eventually

_LOOK_EVERY = 200
_TELL_SECONDS = 10.0
_RENEW_EVERY = 100
# What a broken worker does to itself is logged as an error. Everything else is one of ours.
_EXPECTED = ("a plan that cannot be parsed", "the plan ring is broken")


class Surface(Protocol):
    """Something that takes random inputs."""

    def send(self, chance: random.Random) -> None:
        """One input. Raises AssertionError if it did harm that shows at once."""

    def close(self) -> None: ...

    def __str__(self) -> str:
        """What became of the inputs."""


class Requests:
    """The RPC surface."""

    def __init__(self, service: LocalService) -> None:
        self._victim = Victim(service)
        self._codes: Counter[str] = Counter()

    def send(self, chance: random.Random) -> None:
        garbage = chance.randbytes(chance.randrange(200))
        mutations = chance.randrange(MOST_MUTATIONS + 1)
        code = self._victim.send_random(
            chance.choice(CALLS), chance.choice(KINDS), mutations, garbage, chance
        )
        self._codes[code.name] += 1
        if len(self._victim.opened) >= _RENEW_EVERY:
            self._victim.close_opened()

    def close(self) -> None:
        self._victim.leave()
        self._victim.close_opened()

    def __str__(self) -> str:
        return tally(self._codes)


SURFACES: dict[str, Callable[[LocalService], Surface]] = {
    "rpc": Requests,
    "words": SharedWords,
    "packets": Packets,
    "reports": lambda _: Reports(),
}


class ErrorLog(logging.Handler):
    """Errors that a service logs, but for those that a broken worker causes to itself."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if not any(expected in text for expected in _EXPECTED):
            self.found.append(text)

    def __enter__(self) -> "ErrorLog":
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)


def fuzz(
    surface: str, inputs: int, seed: int, folder: Path, tell: Callable[[str], None]
) -> Surface:
    """Send `inputs` random inputs to a surface, and return it: it says what became of them.

    Raises:
        AssertionError: something was wrong; names the input.
    """
    settings = Settings(
        address=f"unix:{folder}/d/i.sock",
        gate_bound_seconds=0.002,
        max_sessions=256,
        # A machine that stands still for a while is no fault of the service.
        lease_seconds=3600,
    )
    with running(settings) as service, ErrorLog() as errors, ExitStack() as stack:
        neighbour = Worker(service).attach()
        stack.callback(neighbour.leave)
        target = SURFACES[surface](service)
        told = time.monotonic()
        for number in range(inputs):
            try:
                target.send(random.Random(f"{surface} {seed} {number}"))
                if number % _LOOK_EVERY == _LOOK_EVERY - 1 or number == inputs - 1:
                    assert neighbour.works(), "another session's answer is wrong"
                assert not errors.found, errors.found[0]
            except Exception as error:
                raise AssertionError(
                    f"{surface}: input {number} of seed {seed}: {type(error).__name__}: {error}"
                ) from error
            if time.monotonic() > told + _TELL_SECONDS:
                told = time.monotonic()
                tell(f"{surface}: {number + 1} of {inputs}")
        target.close()
        neighbour.close()
        assert service.status().serving
        assert eventually(lambda: service.status().mapped_bytes == 0), "memory stays mapped"
        assert not errors.found, errors.found[0]
        return target


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.service.fuzz")
    parser.add_argument("--inputs", type=int, default=100_000, help="of all surfaces together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=SURFACES, default=list(SURFACES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.CRITICAL)
    share = -(-asked.inputs // len(asked.only))
    for surface in asked.only:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="dsa-indexer-fuzz-") as folder:
            try:
                found = fuzz(
                    surface, share, asked.seed, Path(folder), lambda line: print(line, flush=True)
                )
            except AssertionError as error:
                print(error, file=sys.stderr)
                return 1
        seconds = time.monotonic() - began
        print(f"{surface}: {share} inputs, {seconds:.0f} s: {found}", flush=True)
    print(f"{share * len(asked.only)} inputs, seed {asked.seed}: nothing was wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
