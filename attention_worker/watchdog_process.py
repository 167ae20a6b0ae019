"""A process that ends the waits of a stream that sleeps (`python -m` and this module's name).

Nothing on the GPU counts time there, and the worker's own threads may all stand behind a lock of
Python's that a call into CUDA holds. Imports neither torch nor CUDA.

Arguments: descriptors of the flag block and of a socket, the number of layers, and the bound in
seconds. Over the socket comes a descriptor of the service's process, or none; its end is the
worker's.
"""

import mmap
import os
import select
import socket
import sys
import time

from ipc_handoff.flag_words import FlagLayout, FlagWords

_LOOKS_A_BOUND = 8
_DEAD_SECONDS = 0.001


class Stalls:
    """Which waits have gone on for too long without progress of the service.

    Args:
        bound: seconds.
    """

    def __init__(self, flags: FlagWords, bound: float) -> None:
        self._flags = flags
        self._bound = bound
        self._progress = 0
        self._since: dict[int, tuple[int, float]] = {}

    def abort_stalled(self, now: float, is_dead: bool) -> list[int]:
        """End them, or all if the service is dead; their ordinals."""
        flags = self._flags
        if (progress := flags.progress()) != self._progress:
            self._progress = progress
            self._since.clear()
        aborted = []
        for ordinal in range(flags.layers):
            if not flags.is_waited_for(ordinal):
                self._since.pop(ordinal, None)
                continue
            step = flags.request(ordinal)
            known, since = self._since.setdefault(ordinal, (step, now))
            if known != step:
                self._since[ordinal] = (step, now)
            elif is_dead or now - since >= self._bound:
                flags.abort(ordinal)
                self._since.pop(ordinal)
                aborted.append(ordinal)
        return aborted


def watch(flags: FlagWords, peer: socket.socket, bound: float) -> None:
    """Until the worker has gone."""
    stalls = Stalls(flags, bound)
    process: int | None = None
    is_dead = False
    while True:
        poll = select.poll()
        poll.register(peer, select.POLLIN)
        if process is not None and not is_dead:
            poll.register(process, select.POLLIN)
        seconds = _DEAD_SECONDS if is_dead else bound / _LOOKS_A_BOUND
        for descriptor, _ in poll.poll(max(1, round(seconds * 1000))):
            if descriptor == process:
                is_dead = True
                continue
            message, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
            if not message:
                return
            if process is not None:
                os.close(process)
            process, is_dead = (descriptors[0] if descriptors else None), False
        stalls.abort_stalled(time.monotonic(), is_dead)


def main(flags: str, peer: str, layers: str, bound: str) -> None:
    block = mmap.mmap(int(flags), FlagLayout(int(layers)).size)
    words = FlagWords(memoryview(block), int(layers))
    watch(words, socket.socket(fileno=int(peer)), float(bound))


if __name__ == "__main__":
    main(*sys.argv[1:])
