"""While the service registers an attachment's memory it may make kernels, for minutes."""

import time
from collections.abc import Callable

from indexer_client.errors import SESSION_LOST, IndexerError, ServiceUnavailable


class Registering:
    """Looks, a few times a second, whether the call is worth waiting for; renews the lease.

    A service that makes kernels answers other calls meanwhile: one that does not is frozen, and
    must not hold up the way to its successor.

    Args:
        keep_alive: renews the session's lease; raises IndexerError.
        lease_seconds: of the session.
        silent_seconds: how long the service may answer nothing.
        is_wanted: whether anybody still waits for the attachment.
    """

    def __init__(
        self,
        keep_alive: Callable[[], None],
        *,
        lease_seconds: float,
        silent_seconds: float,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._keep_alive = keep_alive
        self._silent = silent_seconds
        self._every = min(lease_seconds, silent_seconds) / 3
        self._is_wanted = is_wanted
        self._heard = self._asked = time.monotonic()

    def look(self) -> None:
        """Raise ServiceUnavailable if nobody should wait any longer.

        Never a refusal: the service may have mapped the memory already.
        """
        if not self._is_wanted():
            raise ServiceUnavailable("the session was closed while its memory was registered")
        if time.monotonic() < self._asked + self._every:
            return
        try:
            self._keep_alive()
            self._heard = time.monotonic()
        except SESSION_LOST as error:
            raise ServiceUnavailable(f"lost while its memory was registered: {error}") from error
        except IndexerError as error:
            if time.monotonic() >= self._heard + self._silent:
                raise ServiceUnavailable(
                    f"silent while it registered memory: no answer within {self._silent} s"
                ) from error
        self._asked = time.monotonic()
