"""The units: valid for systemd, and their hardening hides nothing that both sides need."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.programs import UNITS, unit_entries

TEMPLATE, MPS = "dsa-indexer@.service", "dsa-indexer-mps.service"
ANALYZE = shutil.which("systemd-analyze")
# What the hand-over calls that a filter might refuse.
NEEDED = ("memfd_create", "eventfd2", "pidfd_open", "sendmsg", "mmap", "flock", "ioctl")
# Each would hide the socket, the pipe, the GPU or the other process.
HIDING = {
    "PrivateTmp",
    "PrivateDevices",
    "PrivateIPC",
    "PrivateNetwork",
    "PrivateUsers",
    "PrivatePIDs",
    "ProtectProc",
    "MemoryDenyWriteExecute",
    "DynamicUser",
}


def verify(units: list[Path], folder: Path) -> str:
    """What `systemd-analyze verify` says of them for GPU 0; their programs need not be here."""
    for unit in units:
        lines = [
            line.replace("/opt/dsa-indexer/bin/python", "/bin/true")
            .replace("/opt/dsa-indexer/bin/dsa-indexer", "/bin/true")
            .replace("/usr/bin/nvidia-cuda-mps-control -f", "/bin/true")
            for line in unit.read_text().splitlines()
        ]
        (folder / unit.name.replace("@.", "@0.")).write_text("\n".join(lines))
    assert ANALYZE is not None
    command = [ANALYZE, "verify", *map(str, folder.glob("*.service"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return result.stdout + result.stderr


@pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    assert [unit.name for unit in UNITS] == [MPS, TEMPLATE]
    said = verify(UNITS, tmp_path)
    assert "dsa-indexer" not in said, said


@pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze")
def test_a_misspelt_key_is_seen(tmp_path: Path) -> None:
    planted = tmp_path / "source" / TEMPLATE
    planted.parent.mkdir()
    text = UNITS[1].read_text()
    planted.write_text(text.replace("RuntimeDirectoryMode", "RuntimeDirectoryModus"))
    target = tmp_path / "units"
    target.mkdir()
    assert "RuntimeDirectoryModus" in verify([UNITS[0], planted], target)


@pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze")
def test_the_filter_lets_the_hand_over_through() -> None:
    (filtered,) = {v for k, v in unit_entries(UNITS[1]) if k == "SystemCallFilter"}
    allowed = calls_of(filtered)
    assert not set(NEEDED) - allowed
    assert "mount" not in allowed


def calls_of(group: str) -> set[str]:
    """The system calls of a group and of the groups inside it."""
    assert ANALYZE is not None
    result = subprocess.run(
        [ANALYZE, "syscall-filter", group], capture_output=True, text=True, timeout=60
    )
    names = {line.strip() for line in result.stdout.splitlines()[1:]} - {""}
    inside = {name for name in names if name.startswith("@")}
    return (names - inside).union(*map(calls_of, inside))


def test_hardening_hides_neither_socket_nor_pipe_nor_gpu_nor_worker() -> None:
    for unit in UNITS:
        values = dict(unit_entries(unit))
        assert not HIDING & values.keys(), unit
        assert "char-nvidia* rw" in values["DeviceAllow"]


def test_the_service_may_write_where_it_must() -> None:
    """Everything else is read-only for it."""
    values = dict(unit_entries(UNITS[1]))
    environment = dict(v.split("=", 1) for k, v in unit_entries(UNITS[1]) if k == "Environment")
    writable = [
        f"/run/{values['RuntimeDirectory']}/",
        f"/var/cache/{values['CacheDirectory']}/",
        f"{values['ReadWritePaths']}/",
    ]
    assert values["ProtectSystem"] == "strict"
    for name in (
        "DSA_INDEXER_ADDRESS",
        "DSA_INDEXER_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "CUDA_MPS_PIPE_DIRECTORY",
    ):
        path = environment[name].removeprefix("unix:") + "/"
        assert any(path.startswith(folder) for folder in writable), name


def test_both_units_have_one_user_and_one_pipe() -> None:
    seen = []
    for unit in UNITS:
        entries = unit_entries(unit)
        environment = dict(v.split("=", 1) for k, v in entries if k == "Environment")
        seen.append((dict(entries)["User"], environment["CUDA_MPS_PIPE_DIRECTORY"]))
    assert seen[0] == seen[1]


def test_the_directories_are_closed_to_others() -> None:
    assert all(dict(unit_entries(unit))["RuntimeDirectoryMode"] == "0700" for unit in UNITS)
