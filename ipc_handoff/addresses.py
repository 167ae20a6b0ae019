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
