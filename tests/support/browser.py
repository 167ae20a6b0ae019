"""A headless browser, where there is one."""

import re
import shutil
import subprocess
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_CONSOLE = re.compile(r":CONSOLE(?::|\()\d+\)?\] (.*)")
_SECONDS = 120


def browser() -> str | None:
    """Its program; None: there is none on this machine."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def screenshot(program: str, page: Path, picture: Path, profile: Path) -> list[str]:
    """Open `page` and take a picture of it; what it wrote to its console."""
    result = subprocess.run(
        [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={profile}",
            "--enable-logging=stderr",
            "--v=0",
            "--window-size=1280,1000",
            "--hide-scrollbars",
            f"--screenshot={picture}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SECONDS,
    )
    assert picture.exists(), result.stderr
    return _CONSOLE.findall(result.stderr)
