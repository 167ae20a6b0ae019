"""The files of a service's Unix sockets: whose they are, and who may remove them.

gRPC unlinks the path of a socket when it starts and again when it stops. A service that was
frozen, replaced and thawed would so remove its successor's socket. Therefore each process
binds names of its own (`NAME.PID`, and `NAME.PID.fd` for descriptors), and the public NAME is
a symbolic link, replaced in one step and removed only by the process it points to.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from indexer_service.errors import StartError

logger = logging.getLogger(__name__)

_MAX_PATH_BYTES = 107  # sun_path is 108 bytes with its final NUL
_DESCRIPTOR_SUFFIX = ".fd"
_LINK_SUFFIX = ".link"
_LOCK_SECONDS = 5.0
_HEALTH_SECONDS = 1.0
# Codes with which gRPC says that nobody answered; any other one came from a service.
_SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class SocketDirectory:
    """The sockets of one service under one public name.

    Args:
        public: path that clients know.

    Attributes:
        server_path, descriptor_path: where this process binds, after `claim`.
    """

    def __init__(self, public: Path) -> None:
        self.public = Path(os.path.abspath(public))
        self.directory = self.public.parent
        self._own = f"{self.public.name}.{os.getpid()}"
        self._created = False
        self._claimed = False
        self._lock: int | None = None
        longest = os.fsencode(self.directory / f"{self._own}.00000000{_DESCRIPTOR_SUFFIX}")
        if len(longest) > _MAX_PATH_BYTES:
            raise StartError(
                f"address: {self.public} needs {len(longest)} bytes with the process's own "
                f"suffix, a socket path holds {_MAX_PATH_BYTES} (fix: a shorter directory)"
            )

    @property
    def server_path(self) -> Path:
        return self.directory / self._own

    @property
    def descriptor_path(self) -> Path:
        return self.directory / (self._own + _DESCRIPTOR_SUFFIX)

    def claim(self) -> None:
        """Make the directory ready for binding and keep other services out until `publish`.

        Blocks, at most a few seconds.

        Raises:
            StartError: the directory is not private, or a live service has the public name.
        """
        self._make_directory()
        self._lock = self._take_lock()
        try:
            self._refuse_a_live_service()
            self._remove_stale_files()
            if self.server_path.exists() or self.descriptor_path.exists():
                # Somebody listens there: a process with our number in another PID namespace.
                self._own += f".{secrets.token_hex(4)}"
        except BaseException:
            self.release()
            raise
        self._claimed = True

    def publish(self) -> None:
        """Let the public name point here. The sockets are bound."""
        link = self.directory / (self._own + _LINK_SUFFIX)
        link.unlink(missing_ok=True)
        link.symlink_to(self._own)
        os.replace(link, self.public)
        self.release()

    def release(self) -> None:
        """Let other services in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def is_replaced(self) -> bool:
        """Whether another service took the public name over. A name that is gone tells nothing."""
        try:
            return os.readlink(self.public) != self._own
        except OSError:
            return False

    def withdraw(self) -> None:
        """After the sockets are closed: remove every file that no live process uses.

        Blocks, at most a few seconds. Removes the directory if we made it and it is empty.
        """
        if not self._claimed or not self.directory.is_dir():
            return
        with self._locked_if_possible():
            self.server_path.unlink(missing_ok=True)
            self.descriptor_path.unlink(missing_ok=True)
            self._remove_stale_files()
            if self._created:
                with suppress(OSError):
                    self.directory.rmdir()

    @contextmanager
    def _locked_if_possible(self) -> Iterator[None]:
        try:
            self._lock = self._lock if self._lock is not None else self._take_lock()
        except StartError as error:
            logger.warning("%s; removing this service's sockets all the same", error)
        try:
            yield
        finally:
            self.release()

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(mode=0o700)
            self._created = True
        except FileExistsError:
            pass
        except OSError as error:
            raise StartError(
                f"address: {self.directory} cannot be made: {error.strerror} "
                "(fix: make its parent, or listen elsewhere)"
            ) from None

    def _take_lock(self) -> int:
        """Lock the directory itself; the descriptor that holds the lock."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            lock = self._open_directory()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A service that stopped meanwhile may have removed the directory we locked.
                if os.path.samestat(os.fstat(lock), os.stat(self.directory)):
                    return lock
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):
                    os.close(lock)
                    raise
            os.close(lock)
            if time.monotonic() > deadline:
                raise StartError(
                    f"address: another service has been starting in {self.directory} for "
                    f"{_LOCK_SECONDS:.0f} s (fix: end it, or listen elsewhere)"
                )
            time.sleep(0.02)
            self._make_directory()

    def _open_directory(self) -> int:
        try:
            descriptor = os.open(
                self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        except OSError as error:
            raise StartError(
                f"address: {self.directory} is not a directory that can be used: "
                f"{error.strerror} (fix: listen in a directory of your own)"
            ) from None
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            os.close(descriptor)
            raise StartError(
                f"address: {self.directory} belongs to user {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):04o} (fix: a directory of user {os.geteuid()} "
                f"with mode 0700)"
            )
        return descriptor

    def _refuse_a_live_service(self) -> None:
        if not os.path.lexists(self.public):
            return
        if not self.public.is_symlink() and not self.public.is_socket():
            raise StartError(
                f"address: {self.public} exists and is not a socket (fix: another name)"
            )
        if not _somebody_listens(self.public):
            return
        if _answers(self.public):
            raise StartError(
                f"address: a service already runs at {self.public} (fix: end it, or listen "
                "elsewhere)"
            )
        logger.warning(
            "a service listens at %s and does not answer (frozen?): taking over its name",
            self.public,
        )

    def _remove_stale_files(self) -> None:
        """Remove what processes of this public name left behind when they died. Needs the lock."""
        ours = re.compile(
            re.escape(self.public.name)
            + rf"(\.\d+(\.[0-9a-f]{{8}})?(\{_DESCRIPTOR_SUFFIX}|\{_LINK_SUFFIX})?)?"
        )
        for path in self.directory.iterdir():
            if not ours.fullmatch(path.name) or not (path.is_symlink() or path.is_socket()):
                continue
            # Only the holder of the lock has a half-made link, and it is not making one now.
            if path.name.endswith(_LINK_SUFFIX) or not _somebody_listens(path):
                path.unlink(missing_ok=True)


def _somebody_listens(path: Path) -> bool:
    """Whether a process, even a frozen one, has a socket bound at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            # A full backlog, or a socket of another type: both need a living owner.
            return True
        return True


def _answers(path: Path) -> bool:
    """Whether a gRPC service answers a health check at `path`."""
    with grpc.insecure_channel(f"unix:{path}") as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_HEALTH_SECONDS
            )
        except grpc.RpcError as error:
            return error.code() not in _SILENCE
        return True
