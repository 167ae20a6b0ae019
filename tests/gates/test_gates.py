"""The gates for kernels that need no GPU: interpreted and compiled, and each seen to fail."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from tests.gates.kernels import ARCHITECTURES, NOT_INTERPRETED, SHARED_LIMIT, builds
from tests.gates.written import kernels, without_a_gate

SECONDS = 240

Compiled = Future[list[dict[str, Any]]]

PLANTED = {
    "beyond the end": "1 lanes out of bounds",
    "stores of two programs": "nothing orders it after the store",
    "load of an earlier program's store": "nothing orders it after the store",
    "store after a later program's load": "nothing orders it after the load",
    "load of own store without a barrier": "no tl.debug_barrier() in between",
    "no barrier before the release": "nothing orders it after the store",
    "relaxed counter": "nothing orders it after the store",
    "release without acquire": "nothing orders it after the store",
    "acquire without release": "nothing orders it after the store",
    "counter of one program's scope": "nothing orders it after the store",
    "counter of each program": "nothing orders it after the load",
    "fma of bf16": "bf16 is not interpreted",
    "integers to bf16": "bf16 is not interpreted",
    "wrong answer": "not close",
}
"""What the interpreter's gate says of each planted fault."""


def lines(repository: Path, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """The JSON lines that a gate's own process prints."""
    paths = os.pathsep.join(str(repository / root) for root in (".", "client", "proto"))
    variables = {**os.environ, "PYTHONPATH": paths, **environment}
    variables.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=repository, env=variables, text=True,
        capture_output=True, timeout=SECONDS,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def broken(build: dict[str, Any], arch: int) -> str | None:
    """What a compiled build's limits say against it."""
    if build["error"]:
        return str(build["error"])
    if build["shared"] > SHARED_LIMIT[arch]:
        return f"{build['shared']} bytes of shared memory, {SHARED_LIMIT[arch]} allowed"
    if build["stack"]:
        return f"{build['stack']} bytes of registers spilled"
    if build["specialising"]:
        return f"compiled anew for other values of {build['specialising']}"
    if build["unordered"]:
        return str(build["unordered"])
    return None


def test_every_kernel_is_interpreted_and_answers_as_its_reference(repository: Path) -> None:
    results = lines(repository, "tests.gates.interpret")
    assert not {run["name"]: run["error"] for run in results if run["error"]}
    built = {build.kernel for build in builds()}
    written = kernels(repository)
    assert len(written) >= 8
    wrong = without_a_gate(written, built, set(results[-1]["kernels"]), NOT_INTERPRETED)
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, repository: Path) -> Iterator[dict[int, Compiled]]:
    """What is compiled for each architecture that was asked for, a process a core at a time."""
    chosen = [
        item.callspec.params["arch"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "compiled" in item.fixturenames
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            arch: pool.submit(lines, repository, "tests.gates.compile_for", str(arch))
            for arch in chosen
        }


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_within_the_architectures_limits(
    arch: int, compiled: dict[int, Compiled]
) -> None:
    results = compiled[arch].result()
    assert len(results) >= 6
    wrong = {build["name"]: broken(build, arch) for build in results if broken(build, arch)}
    assert not wrong


def test_interpreted_faults_are_told_from_sound_kernels(repository: Path) -> None:
    results = lines(repository, "tests.gates.interpret", "planted")
    errors = {run["name"]: run["error"] for run in results}
    silent = [name for name, says in PLANTED.items() if says not in (errors.pop(name) or "")]
    assert not silent
    assert len(errors) == 8
    assert not {name: error for name, error in errors.items() if error}


def test_unrepaired_interpreter_gets_small_floats_wrong(repository: Path) -> None:
    """So that the repair is what makes these checks right, and no check can do without it."""
    results = lines(repository, "tests.gates.interpret", "unrepaired")
    assert len(results) == 4
    assert all(run["error"].startswith("AssertionError") for run in results)


@pytest.mark.parametrize(
    ("arch", "fault", "says"),
    [
        (80, "refused", "fp8e4nv"),
        (86, "shared", "bytes of shared memory"),
        (86, "static shared", "bytes of shared memory"),
        (120, "static shared", "bytes of shared memory"),
        (90, "spills", "spilled"),
        (90, "number", "compiled anew for other values of ['size']"),
        (90, "alignment", "compiled anew for other values of ['out']"),
        (90, "wait of four warps", "128 threads look"),
    ],
)
def test_planted_faults_fail_in_the_compiler(
    arch: int, fault: str, says: str, repository: Path
) -> None:
    (result,) = lines(repository, "tests.gates.compile_for", str(arch), fault)
    assert says in (broken(result, arch) or "")


@pytest.mark.parametrize("arch", [86, 120])
def test_shared_memory_of_assembly_is_what_is_too_much(arch: int, repository: Path) -> None:
    (result,) = lines(repository, "tests.gates.compile_for", str(arch), "static shared")
    assert result["static"] == 44_000
    assert broken(result | {"shared": result["shared"] - result["static"]}, arch) is None


def test_an_fp8_store_compiles_where_the_hardware_has_it(repository: Path) -> None:
    (result,) = lines(repository, "tests.gates.compile_for", "89", "refused")
    assert broken(result, 89) is None


@pytest.mark.parametrize(
    ("build", "says"),
    [
        ("publish", "between a store of all threads and the release"),
        ("stage", "between a store of all threads and the release"),
        ("wait and hand back", "between the acquire and a load"),
    ],
)
def test_a_kernel_without_its_barriers_is_told_from_a_sound_one(
    build: str, says: str, repository: Path, tmp_path: Path
) -> None:
    for package in ("indexer_service", "attention_worker", "tests", "client", "proto"):
        (tmp_path / package).symlink_to(repository / package)
    shutil.copytree(repository / "ipc_handoff", tmp_path / "ipc_handoff")
    taken = 0
    for path in (tmp_path / "ipc_handoff").rglob("*.py"):
        parts = path.read_text().split("tl.debug_barrier()")
        path.write_text("pass".join(parts))
        taken += len(parts) - 1
    assert taken >= 6
    (result,) = lines(tmp_path, "tests.gates.compile_for", "90", build)
    assert says in (broken(result, 90) or "")
    (result,) = lines(repository, "tests.gates.compile_for", "90", build)
    assert broken(result, 90) is None


_WAIT, _START = (
    "        tl.extra.cuda.gdc_wait()\n",
    "        tl.extra.cuda.gdc_launch_dependents()\n",
)


@pytest.mark.parametrize(
    ("build", "there", "instead", "says"),
    [
        ("stage", _WAIT + _START, _START + _WAIT, "before this one has waited"),
        ("done", _WAIT + _START, _START + _WAIT, "before this one has waited"),
        ("wait", _WAIT, _WAIT + _START, "before this one has looked"),
        ("gate", _WAIT, _WAIT + _START, "before this one has looked"),
    ],
)
def test_a_kernel_that_lets_the_next_one_start_too_early_is_seen(
    build: str, there: str, instead: str, says: str, repository: Path, tmp_path: Path
) -> None:
    for package in ("indexer_service", "attention_worker", "tests", "client", "proto"):
        (tmp_path / package).symlink_to(repository / package)
    shutil.copytree(repository / "ipc_handoff", tmp_path / "ipc_handoff")
    path = tmp_path / "ipc_handoff" / "kernels" / f"{build}.py"
    assert path.read_text().count(there) == 1
    path.write_text(path.read_text().replace(there, instead))
    (result,) = lines(tmp_path, "tests.gates.compile_for", "90", build)
    assert says in (broken(result, 90) or "")
