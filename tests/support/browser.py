"""A headless browser, where there is one."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_CONSOLE = re.compile(r":CONSOLE(?::|\()\d+\)?\] (.*)")
_SECONDS = 120


def needed_browser() -> str:
    """Its program. The test is skipped where there is none."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("no Chromium on this machine (make test installs it as root, by apt)")
    return program


def screenshot(
    program: str, page: Path, picture: Path, profile: Path, *, height: int = 1000
) -> list[str]:
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
            f"--window-size=1280,{height}",
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
