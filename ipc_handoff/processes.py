"""Proof that a peer process is dead."""

import os
import select


class ProcessWatch:
    """Watches a process through a pidfd, which never names another process.

    Args:
        pid: in our PID namespace; 0 when the peer's namespace is not visible from ours.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor: int | None = None
        self._dead_on_arrival = False
        if pid > 0:
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead_on_arrival = True
            except OSError:
                pass  # Not allowed here (an old container's filter): never a proof.

    def fileno(self) -> int | None:
        """Readable once the process is dead; None if it cannot be watched."""
        return self._descriptor

    def is_dead(self) -> bool:
        """True only with proof."""
        if self._descriptor is None:
            return self._dead_on_arrival
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
