"""The gates for kernels that need no GPU: interpreted and compiled, and each seen to fail."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from tests.gates.conftest import Results
from tests.gates.jobs import Change, Job
from tests.gates.kernels import ARCHITECTURES, SHARED_LIMIT, builds
from tests.gates.written import kernels, without_a_gate

# A test waits for its process, and that for the cores that others have.
pytestmark = pytest.mark.timeout(900)

_INTERPRET, _COMPILE = "tests.gates.interpret", "tests.gates.compile_for"

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
    "early launch without a wait": "before gdc_wait",
    "fma of bf16": "bf16 is not interpreted",
    "integers to bf16": "bf16 is not interpreted",
    "wrong answer": "not close",
}
"""What the interpreter's gate says of each planted fault."""


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


def one_job(job: Job) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("job", [job], ids=[" ".join(job.arguments) or "all"])


@pytest.mark.parametrize(
    ("half", "other"), [[Job(_INTERPRET, ("", str(share), "2")) for share in range(2)]], ids=["all"]
)
def test_every_kernel_is_interpreted_and_answers_as_its_reference(
    half: Job, other: Job, results: Results, repository: Path
) -> None:
    halves = results(half), results(other)
    runs = [*halves[0], *halves[1]]
    assert not {run["name"]: run["error"] for run in runs if run["error"]}
    built = {build.kernel for build in builds()}
    written = kernels(repository)
    assert len(written) >= 8
    launched = {kernel for part in halves for kernel in part[-1]["kernels"]}
    wrong = without_a_gate(written, built, launched)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("arch", "job"),
    [pytest.param(arch, Job(_COMPILE, (str(arch),)), id=str(arch)) for arch in ARCHITECTURES],
)
def test_kernels_compile_within_the_architectures_limits(
    arch: int, job: Job, results: Results
) -> None:
    compiled = results(job)
    assert len(compiled) >= 6
    wrong = {build["name"]: broken(build, arch) for build in compiled if broken(build, arch)}
    assert not wrong


@one_job(Job(_INTERPRET, ("planted",)))
def test_interpreted_faults_are_told_from_sound_kernels(job: Job, results: Results) -> None:
    errors = {run["name"]: run["error"] for run in results(job)}
    silent = [name for name, says in PLANTED.items() if says not in (errors.pop(name) or "")]
    assert not silent
    assert len(errors) == 9
    assert not {name: error for name, error in errors.items() if error}


@one_job(Job(_INTERPRET, ("unrepaired",)))
def test_unrepaired_interpreter_gets_small_floats_wrong(job: Job, results: Results) -> None:
    """So that the repair is what makes these checks right, and no check can do without it."""
    runs = results(job)
    assert len(runs) == 4
    assert all(run["error"].startswith("AssertionError") for run in runs)


WITHOUT_BARRIERS = ("publish", "stage", "wait and hand back")
# One process an architecture, as each compiles for one.
FAULTS = {
    80: ("refused",),
    86: ("shared", "static shared"),
    89: ("refused",),
    90: ("spills", "number", "alignment", "wait of four warps", *WITHOUT_BARRIERS),
    120: ("static shared",),
}


def planted(arch: int, fault: str, *more: Any) -> Any:
    job = Job(_COMPILE, (str(arch), *FAULTS[arch]))
    return pytest.param(job, arch, fault, *more, id=f"{arch}-{fault}")


def found(results: Results, job: Job, build: str) -> dict[str, Any]:
    (result,) = [result for result in results(job) if result["name"] == build]
    return result


@pytest.mark.parametrize(
    ("job", "arch", "fault", "says"),
    [
        planted(80, "refused", "fp8e4nv"),
        planted(86, "shared", "bytes of shared memory"),
        planted(86, "static shared", "bytes of shared memory"),
        planted(120, "static shared", "bytes of shared memory"),
        planted(90, "spills", "spilled"),
        planted(90, "number", "compiled anew for other values of ['size']"),
        planted(90, "alignment", "compiled anew for other values of ['out']"),
        planted(90, "wait of four warps", "128 threads look"),
    ],
)
def test_planted_faults_fail_in_the_compiler(
    job: Job, arch: int, fault: str, says: str, results: Results
) -> None:
    assert says in (broken(found(results, job, fault), arch) or "")


@pytest.mark.parametrize(
    ("job", "arch", "fault"), [planted(arch, "static shared") for arch in (86, 120)]
)
def test_shared_memory_of_assembly_is_what_is_too_much(
    job: Job, arch: int, fault: str, results: Results
) -> None:
    result = found(results, job, fault)
    assert result["static"] == 44_000
    assert broken(result | {"shared": result["shared"] - result["static"]}, arch) is None


@pytest.mark.parametrize(("job", "arch", "fault"), [planted(89, "refused")])
def test_an_fp8_store_compiles_where_the_hardware_has_it(
    job: Job, arch: int, fault: str, results: Results
) -> None:
    assert broken(found(results, job, fault), arch) is None


@pytest.mark.parametrize(
    ("job", "arch", "build"), [planted(90, build) for build in WITHOUT_BARRIERS]
)
def test_a_kernel_with_its_barriers_is_sound(
    job: Job, arch: int, build: str, results: Results
) -> None:
    assert broken(found(results, job, build), arch) is None


_NO_BARRIER = Change("ipc_handoff/**/*.py", "tl.debug_barrier()", "pass", times=None)


@pytest.mark.parametrize(
    "job", [Job(_COMPILE, ("90", *WITHOUT_BARRIERS), (_NO_BARRIER,))], ids=[""]
)
@pytest.mark.parametrize(
    ("build", "says"),
    [
        ("publish", "between a store of all threads and the release"),
        ("stage", "between a store of all threads and the release"),
        ("wait and hand back", "between the acquire and a load"),
    ],
)
def test_a_kernel_without_its_barriers_is_told_from_a_sound_one(
    job: Job, build: str, says: str, results: Results
) -> None:
    assert says in (broken(found(results, job, build), 90) or "")


_WAIT, _START = (
    "        tl.extra.cuda.gdc_wait()\n",
    "        tl.extra.cuda.gdc_launch_dependents()\n",
)
_EARLY = {
    "stage": (_WAIT + _START, _START + _WAIT, "before this one has waited"),
    "done": (_WAIT + _START, _START + _WAIT, "before this one has waited"),
    "wait": (_WAIT, _WAIT + _START, "before this one has looked"),
    "gate": (_WAIT, _WAIT + _START, "before this one has looked"),
}
_TOO_EARLY = tuple(
    Change(f"ipc_handoff/kernels/{build}.py", there, instead)
    for build, (there, instead, _) in _EARLY.items()
)


@pytest.mark.parametrize("job", [Job(_COMPILE, ("90", *_EARLY), _TOO_EARLY)], ids=["90"])
@pytest.mark.parametrize("build", _EARLY)
def test_a_kernel_that_lets_the_next_one_start_too_early_is_seen(
    job: Job, build: str, results: Results
) -> None:
    assert _EARLY[build][2] in (broken(found(results, job, build), 90) or "")
