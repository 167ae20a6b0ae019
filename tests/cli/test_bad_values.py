"""Values that cannot be used: the command ends with one line that names field and fix."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from dsa_indexer_cli.main import app
from tests.cli.lines import one_line


@pytest.fixture(autouse=True)
def logging_stays_as_it_was() -> Iterator[None]:
    """The command sets up logging for its process, which here is the tests'."""
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield
    root.handlers[:], level = before
    root.setLevel(level)


def invoke(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, arguments, env=environment)


@pytest.mark.parametrize(
    ("flag", "value", "field"),
    [
        ("--lease-seconds", "-1", "lease_seconds"),
        ("--lease-seconds", "soon", "lease_seconds"),
        ("--max-sessions", "0", "max_sessions"),
        ("--workspace-bytes", "many", "workspace_bytes"),
        ("--trace-ratio", "2", "trace_ratio"),
        ("--log-level", "LOUD", "log_level"),
        ("--device", "moon", "device"),
        ("--engine", "steam", "engine"),
        ("--address", "0.0.0.0:1234", "address"),
        ("--address", "nowhere", "address"),
        ("--config", "/nonexistent.toml", "config"),
        ("--trace-file", "/nonexistent/t.jsonl", "trace_file"),
    ],
)
def test_a_bad_flag_of_serve_ends_in_one_line_with_field_and_fix(
    flag: str, value: str, field: str
) -> None:
    result = invoke("serve", flag, value)
    assert result.exit_code == 2
    line = one_line(result.stderr)
    assert line.startswith(f"error: {field}: ")
    assert "(fix: " in line


@pytest.mark.parametrize("command", ["status", "doctor"])
@pytest.mark.parametrize(
    ("variable", "value"),
    [("SIGNALLING", "smoke"), ("WAIT_BOUND_SECONDS", "0"), ("BANKS", "none")],
)
def test_a_bad_variable_of_the_client_ends_in_one_line_with_field_and_fix(
    command: str, variable: str, value: str
) -> None:
    result = invoke(command, **{f"DSA_INDEXER_{variable}": value})
    assert result.exit_code == 2
    line = one_line(result.stderr)
    assert line.startswith(f"error: {variable.lower()}: ")
    assert "(fix: " in line and f"DSA_INDEXER_{variable}" in line


@pytest.mark.parametrize("command", ["status", "doctor"])
@pytest.mark.parametrize("address", ["foo", "host:port", "host:70000", "unix:"])
def test_an_address_that_is_none_ends_in_one_line_with_the_forms(
    command: str, address: str
) -> None:
    result = invoke(command, "--address", address)
    assert result.exit_code == 2
    line = one_line(result.stderr)
    assert line.startswith("error: address: ")
    assert "(fix: unix:PATH or HOST:PORT)" in line


def test_a_trace_file_of_the_demo_that_cannot_be_written_ends_in_one_line() -> None:
    result = invoke("demo", "--trace-file", "/nonexistent/t.jsonl")
    assert result.exit_code == 2
    assert one_line(result.stderr).startswith("error: trace_file: ")


def test_half_a_tls_configuration_ends_in_one_line_with_field_and_fix() -> None:
    result = invoke("status", "--address", "127.0.0.1:1", DSA_INDEXER_CLIENT_TLS_KEY="/k.pem")
    assert result.exit_code == 2
    line = one_line(result.stderr)
    assert line.startswith("error: client_tls_certificate: ") and "(fix: " in line
