"""Tuned configurations: measured once, remembered on disk by whoever comes later."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from indexer_service.kernels import tuned_file, tuning


@dataclass(frozen=True)
class Blocks:
    size: int


CPU = torch.device("cpu")
best = partial(tuning.best, device=CPU)

CONFIGURATIONS = (Blocks(32), Blocks(64), Blocks(128))
KEY = {"heads": 64, "dtype": "bf16"}
TIMES = {Blocks(32): 3.0, Blocks(64): 1.0, Blocks(128): 2.0}


class Timer:
    """Times from a table, and which configurations were measured."""

    def __init__(self, times: dict[Blocks, float] = TIMES) -> None:
        self.times, self.measured = times, list[Blocks]()

    def __call__(self, configuration: Blocks) -> float:
        self.measured.append(configuration)
        return self.times[configuration]


@pytest.fixture(autouse=True)
def new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A directory of its own, and a function that forgets what the process knows."""
    monkeypatch.setenv(tuned_file.CACHE_DIRECTORY, str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_chosen", {})
    return lambda: monkeypatch.setattr(tuning, "_chosen", {})


def test_fastest_is_chosen_and_measured_once(new_process: Callable[[], None]) -> None:
    timer = Timer()
    assert best("paged", KEY, CONFIGURATIONS, timer) == Blocks(64)
    assert timer.measured == list(CONFIGURATIONS)
    new_process()
    assert best("paged", dict(reversed(KEY.items())), CONFIGURATIONS, timer) == Blocks(64)
    assert timer.measured == list(CONFIGURATIONS)


def test_launch_path_only_looks_up(new_process: Callable[[], None]) -> None:
    assert tuning.chosen("paged", KEY, Blocks(1)) == Blocks(1)
    best("paged", KEY, CONFIGURATIONS, Timer())
    assert tuning.chosen("paged", KEY, Blocks(1)) == Blocks(64)
    assert tuning.chosen("paged", KEY | {"heads": 32}, Blocks(1)) == Blocks(1)
    assert tuning.chosen("ragged", KEY, Blocks(1)) == Blocks(1)


def test_launch_path_imports_no_pydantic() -> None:
    program = (
        "import sys; from indexer_service.kernels import tuning; tuning.chosen('a', {}, 1); "
        "sys.exit('pydantic' in sys.modules or 'triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_other_keys_and_operations_are_measured_apart() -> None:
    timer = Timer()
    best("paged", KEY, CONFIGURATIONS, timer)
    best("paged", KEY | {"heads": 32}, CONFIGURATIONS, timer)
    best("ragged", KEY, CONFIGURATIONS, timer)
    assert len(timer.measured) == 9
    stored = json.loads(tuned_file.path(CPU).read_text())
    assert stored["format"] == 1
    assert {name: len(keys) for name, keys in stored["chosen"].items()} == {"paged": 2, "ragged": 1}


def test_a_choice_that_is_no_longer_offered_is_measured_anew(
    new_process: Callable[[], None],
) -> None:
    timer = Timer()
    best("paged", KEY, CONFIGURATIONS, timer)
    new_process()
    assert best("paged", KEY, [Blocks(32), Blocks(128)], timer) == Blocks(128)


def test_one_configuration_needs_no_measurement() -> None:
    timer = Timer()
    assert best("paged", KEY, [Blocks(5)], timer) == Blocks(5)
    assert not timer.measured


@pytest.mark.parametrize("time", [float("nan"), float("inf"), None], ids=["nan", "inf", "raises"])
def test_what_does_not_run_is_left_out(
    time: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    times = {key: value for key, value in TIMES.items() if key != Blocks(64)}
    if time is not None:
        times[Blocks(64)] = time
    assert best("paged", KEY, CONFIGURATIONS, Timer(times)) == Blocks(128)
    assert "paged: Blocks(size=64) is left out" in caplog.text


def test_nothing_that_runs_is_an_error_and_remembered_nowhere() -> None:
    with pytest.raises(KeyError):
        best("paged", KEY, CONFIGURATIONS, Timer({}))
    assert not tuned_file.path(CPU).exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"format": 2, "chosen": {}}', b'{"chosen": {"paged": 3}}'],
)
def test_a_corrupt_file_is_named_and_replaced(
    content: bytes, caplog: pytest.LogCaptureFixture, new_process: Callable[[], None]
) -> None:
    file = tuned_file.path(CPU)
    file.parent.mkdir()
    file.write_bytes(content)
    assert best("paged", KEY, CONFIGURATIONS, Timer()) == Blocks(64)
    assert str(file) in caplog.text
    new_process()
    caplog.clear()
    assert best("paged", KEY, CONFIGURATIONS, Timer({})) == Blocks(64)
    assert not caplog.records


def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(tuned_file.CACHE_DIRECTORY, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert best("paged", KEY, CONFIGURATIONS, Timer()) == Blocks(64)
    assert f"{tuned_file.path(CPU)}: tuned choices are not kept" in caplog.text
    assert tuning.chosen("paged", KEY, Blocks(1)) == Blocks(64)


def test_processes_that_write_at_once_lose_nothing() -> None:
    program = (
        "import sys, torch; from indexer_service.kernels import tuned_file\n"
        "cpu = torch.device('cpu')\n"
        "for key in range(40): tuned_file.remember(cpu, sys.argv[1], str(key), 'x')"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, name]) for name in ("a", "b", "c")]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    stored = json.loads(tuned_file.path(CPU).read_text())["chosen"]
    assert {name: len(keys) for name, keys in stored.items()} == {"a": 40, "b": 40, "c": 40}
    assert not [path for path in tuned_file.directory().iterdir() if "json" in path.name[:-5]]


def test_file_is_named_after_the_given_gpu_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {0: "NVIDIA L4", 1: "NVIDIA H200 / MIG 1g.18gb"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    monkeypatch.setattr(tuned_file, "_version", {"triton": "3.6.0", "dsa-indexer": "1.2+x"}.get)
    second = tuned_file.path(torch.device("cuda", 1))
    assert second.name == "tuned_NVIDIA-H200-MIG-1g.18gb_triton-3.6.0_1.2+x.json"
    assert tuned_file.path(torch.device("cuda", 0)).name.startswith("tuned_NVIDIA-L4_")


def test_directory_is_the_users_cache_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuned_file.directory() == tmp_path / "cache"
    monkeypatch.delenv(tuned_file.CACHE_DIRECTORY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned_file.directory() == tmp_path / "dsa-indexer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuned_file.directory() == Path.home() / ".cache" / "dsa-indexer"
