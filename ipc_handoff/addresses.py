"""Where a service listens, by default and by name."""

import os
import tempfile
from pathlib import Path

UNIX = "unix:"


def default_address() -> str:
    """`unix:` path in a directory of the user's own: $XDG_RUNTIME_DIR, else the temp directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime else Path(tempfile.gettempdir())
    name = "dsa-indexer" if runtime else f"dsa-indexer-{os.getuid()}"
    return f"{UNIX}{base / name / 'indexer.sock'}"


def socket_path(address: str) -> Path | None:
    """The path of a `unix:` address; None for TCP."""
    if not address.startswith(UNIX):
        return None
    return Path(address.removeprefix(UNIX))


def check_address(address: str) -> None:
    """Raise ValueError, naming the forms, unless `address` has one of them."""
    _, colon, port = address.rpartition(":")
    if address.startswith(UNIX):
        valid = bool(address.removeprefix(UNIX))
    else:
        valid = bool(colon) and port.isdecimal() and int(port) <= 0xFFFF
    if not valid:
        raise ValueError(f"address: {address!r} is no address (fix: unix:PATH or HOST:PORT)")
