"""What is deployed agrees with the program: its settings, its options, its probe."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsa_indexer_cli.probe import _parser
from indexer_client.settings import ClientSettings
from indexer_service.kernels.architecture import FORCE_ARCH
from indexer_service.kernels.tuned_file import CACHE_DIRECTORY
from indexer_service.settings import CONFIG_VARIABLE, Settings, load
from ipc_handoff.addresses import socket_path
from tests.deploy.programs import Program, compose_programs, dockerfile, programs

PREFIX = "DSA_INDEXER_"
PROBE = ["-m", "dsa_indexer_cli.probe"]
KNOWN = {
    CONFIG_VARIABLE,
    FORCE_ARCH,
    CACHE_DIRECTORY,
    *(f"{PREFIX}{name.upper()}" for name in (*Settings.model_fields, *ClientSettings.model_fields)),
}
PROGRAMS = programs()
SERVICES = [program for program in PROGRAMS if program.is_service]


def unknown_variables(program: Program) -> set[str]:
    ours = {name for name in program.environment if name.startswith(PREFIX)}
    return ours - KNOWN


def flags_of(command: list[str]) -> dict[str, str]:
    """The options behind `dsa-indexer serve`, by field name."""
    options = command[2:]
    assert len(options) % 2 == 0, command
    names = [option.removeprefix("--").replace("-", "_") for option in options[::2]]
    return dict(zip(names, options[1::2], strict=True))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """None of ours from outside."""
    for name in KNOWN:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_every_variable_is_one_that_the_program_knows(program: Program) -> None:
    assert not unknown_variables(program)


def test_an_unknown_variable_is_seen() -> None:
    program = Program("planted", [], {"DSA_INDEXER_ADRESS": "unix:/x", "HOME": "/"})
    assert unknown_variables(program) == {"DSA_INDEXER_ADRESS"}


@pytest.mark.parametrize("program", SERVICES, ids=str)
def test_a_service_starts_with_these_settings(
    program: Program, environment: pytest.MonkeyPatch
) -> None:
    """Every option exists and takes its value; so does every variable."""
    for name, value in program.environment.items():
        environment.setenv(name, value)
    settings = load(flags_of(program.command))
    assert settings.device.startswith("cuda:")
    path = socket_path(settings.address)
    assert path is not None and path.parent.name == settings.device.removeprefix("cuda:")


def test_a_service_has_a_place_everywhere() -> None:
    files = {program.where.split(":")[0] for program in SERVICES}
    assert files == {
        "Dockerfile",
        "compose.yaml",
        "daemonset.yaml",
        "sidecar.yaml",
        "dsa-indexer@.service",
    }


@pytest.mark.parametrize("program", SERVICES, ids=str)
def test_probes_ask_with_a_command_that_exists(program: Program) -> None:
    assert program.probes
    for probe in program.probes:
        interpreter, *arguments = probe
        assert Path(interpreter).name in ("python", "python3")
        assert arguments[:2] == PROBE
        _parser().parse_args(arguments[2:])


def workers_and_services() -> list[tuple[Program, Program]]:
    """Pairs that must find each other."""
    found = []
    for worker in PROGRAMS:
        if worker.environment.get("DSA_INDEXER_PLACEMENT"):
            file = worker.where.split(":")[0]
            found += [(worker, s) for s in SERVICES if s.where.startswith(f"{file}:")]
    return found


@pytest.mark.parametrize(("worker", "service"), workers_and_services(), ids=str)
def test_worker_and_service_share_socket_and_mps_pipe(worker: Program, service: Program) -> None:
    for name in ("DSA_INDEXER_ADDRESS", "CUDA_MPS_PIPE_DIRECTORY"):
        assert worker.environment[name] == service.environment[name]
    socket = socket_path(service.environment["DSA_INDEXER_ADDRESS"])
    assert socket is not None
    pipe = service.environment["CUDA_MPS_PIPE_DIRECTORY"]
    for program in (worker, service):
        assert pipe in program.mounts
        assert any(socket.is_relative_to(mount) for mount in program.mounts)


def test_there_are_workers() -> None:
    assert len(workers_and_services()) == 2
    assert {str(worker) for worker, _ in workers_and_services()} == {
        "compose.yaml: engine",
        "sidecar.yaml: worker",
    }


def test_compose_shares_what_both_sides_need() -> None:
    for program in compose_programs():
        shared = program.definition
        assert (shared["ipc"], shared["pid"]) == ("host", "host"), program
        assert shared["user"] == "10001:10001"
        assert shared["cap_drop"] == ["ALL"]
        (device,) = shared["deploy"]["resources"]["reservations"]["devices"]
        assert "gpu" in device["capabilities"]


def test_the_image_is_built_from_what_there_is(repository: Path) -> None:
    copied = [
        source
        for key, value in dockerfile()
        if key == "COPY" and not value.startswith("--from")
        for source in value.split()[:-1]
    ]
    assert all((repository / source).exists() for source in copied)
    from tests.packaging.conftest import PACKAGE_ROOTS

    assert all(any(root.startswith(source) for source in copied) for root in PACKAGE_ROOTS)
