"""Prometheus and promtool of this machine, or of the Makefile's."""

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.observability import PROMETHEUS
from tests.support.loopback import free_port
from tests.support.waiting import eventually

_INSTALLED = Path(__file__).resolve().parents[2] / ".venv" / "prometheus" / "usr" / "bin"
LONG = 60.0


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(_INSTALLED))


SERVER, PROMTOOL = _program("prometheus"), _program("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="needs promtool (Debian's package prometheus; `make test` gets it)"
)


def promtool(*arguments: str) -> tuple[int, str]:
    """Exit status and what it said."""
    assert PROMTOOL is not None
    result = subprocess.run(
        [PROMTOOL, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    return result.returncode, result.stdout + result.stderr


class Prometheus:
    """A server that runs; questions over its HTTP interface."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready", timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def ask(self, path: str, **parameters: str) -> Any:
        """`data` of the answer; raises AssertionError with what it complains about."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(
                f"{self._address}/api/v1/{path}?{query}", timeout=10
            ) as got:
                return json.load(got)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series with their values as of now."""
        found = self.ask("query", query=expression)["result"]
        assert isinstance(found, list)
        return found

    def value(self, expression: str) -> float:
        """Of a query with one series; 0 without one."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else 0.0

    def firing(self, name: str) -> list[dict[str, Any]]:
        alerts = self.ask("alerts")["alerts"]
        return [a for a in alerts if a["labels"]["alertname"] == name and a["state"] == "firing"]


@contextmanager
def scraping(folder: Path, ports: Mapping[str, int]) -> Iterator[Prometheus | None]:
    """The shipped configuration, every second instead of every fifteen, of these ports by job.

    None: there is no Prometheus here.
    """
    if SERVER is None:
        yield None
        return
    configuration = _configuration(folder, ports)
    port = free_port()
    command = [
        SERVER,
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(port)
        ready = eventually(lambda: process.poll() is not None or server.is_ready(), LONG)
        assert ready and process.poll() is None, (folder / "log").read_text()
        yield server
    finally:
        process.kill()
        process.wait()


def _configuration(folder: Path, ports: Mapping[str, int]) -> Path:
    """A copy in which what is not started here is asked for at a port that is closed."""
    shutil.copytree(PROMETHEUS, folder, dirs_exist_ok=True)
    path = folder / "prometheus.yaml"
    content = yaml.safe_load(path.read_text())
    content["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in content["scrape_configs"]:
        for fixed in job.get("static_configs", []):
            fixed["targets"] = ["127.0.0.1:1"]
        for found in job.get("file_sd_configs", []):
            (file,) = found["files"]
            place = folder / file.replace("*", "here")
            place.parent.mkdir()
            targets = [f"127.0.0.1:{ports[job['job_name']]}"]
            place.write_text(yaml.safe_dump([{"targets": targets}]))
    path.write_text(yaml.safe_dump(content))
    return path
