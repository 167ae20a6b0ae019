"""The service's settings: one typed object from flags, environment and a TOML file.

A flag wins over `DSA_INDEXER_*`, the environment over the file, the file over the defaults.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from indexer_service.errors import StartError
from ipc_handoff.addresses import default_address
from ipc_handoff.detectors import ALL, DETECTORS_PATTERN, NONE

ENVIRONMENT_PREFIX = "DSA_INDEXER_"
CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"
_MIB = 1 << 20


class SettingsError(StartError):
    """A setting that cannot be used."""


class Settings(BaseSettings):
    """Everything that can be set. Bytes may be written with a unit ("256MiB")."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    address: str = Field(
        default_factory=default_address, description="unix:PATH or HOST:PORT to listen on"
    )
    tls_certificate: Path | None = Field(None, description="PEM certificate chain of the service")
    tls_key: Path | None = Field(None, description="PEM private key of the service")
    tls_client_ca: Path | None = Field(None, description="PEM authorities that clients' must have")
    lease_seconds: float = Field(10.0, gt=0, le=3600, description="life of a silent session")
    max_sessions: int = Field(64, ge=1, le=256, description="open sessions")
    max_message_bytes: ByteSize = Field(
        ByteSize(4 * _MIB), ge=4096, le=64 * _MIB, description="longest gRPC message"
    )
    max_bank_bytes: ByteSize = Field(
        ByteSize(8 << 30), ge=4096, description="control, staging and answers of one session"
    )
    gate_bound_seconds: float = Field(
        1.0, gt=0, le=60, description="longest wait for the worker inside a step"
    )
    workspace_bytes: ByteSize = Field(
        ByteSize(256 * _MIB), ge=_MIB, description="temporary memory of one selection"
    )
    queued_steps: int = Field(64, ge=1, le=4096, description="plans of a session that may wait")
    unread_reports: int = Field(
        256, ge=1, le=65536, description="reports a stream holds for a client that does not read"
    )
    report_write_seconds: float = Field(
        5.0, gt=0, le=600, description="longest time that one report may take to be sent"
    )
    first_plan_seconds: float = Field(
        3600.0, gt=0, le=86400, description="longest time that a stream may wait for its first plan"
    )
    shutdown_grace_seconds: float = Field(
        10.0, ge=0, le=3600, description="time for running steps to end at SIGTERM"
    )
    engine: str = Field("auto", description="auto, or an engine by name")
    cpu_threads: int = Field(1, ge=1, le=1024, description="threads of one selection on the CPU")
    device: str = Field(
        "cpu",
        pattern="^(cpu|auto|cuda(:[0-9]{1,3})?)$",
        description="what selections are computed on: cpu, cuda:N, or auto (a GPU if there is one)",
    )
    detectors: str = Field(
        ALL,
        pattern=DETECTORS_PATTERN,
        description=f"detectors of races that are on: {ALL}, {NONE}, or names by comma",
    )
    trace_file: Path | None = Field(None, description="JSON-lines file for finished spans")
    trace_console: bool = Field(False, description="print finished spans")
    trace_ratio: float = Field(1.0, ge=0, le=1, description="share of calls that are traced")
    trace_slow_seconds: float | None = Field(
        None, gt=0, description="traces of steps that take longer are kept whatever the ratio"
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="where Prometheus reads metrics as text; 0: any free port"
    )
    metrics_host: str = Field("127.0.0.1", description="address that metrics_port is opened on")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="least serious message to log"
    )


def load(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Read all sources.

    Args:
        flags: values by field name; None means that the flag was not given.
        config: the TOML file; default: the one that `DSA_INDEXER_CONFIG` names, if any.

    Raises:
        SettingsError: an unknown key, a value that does not fit, a file that cannot be read.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    path = config or (Path(named) if (named := os.environ.get(CONFIG_VARIABLE)) else None)
    in_file = _read(path) if path else {}
    for source, names in (("the flags", given), (str(path), in_file)):
        for name in names:
            _check_known(name, source)
    of_file = {name: value for name, value in in_file.items() if not _in_environment(name)}
    try:
        return Settings(**{**of_file, **given})
    except ValidationError as error:
        raise _worded(error, given, path) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"config: {path}: {error.strerror} (fix: name a readable TOML file)"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"config: {path}: {error} (fix: write valid TOML)") from None


def _in_environment(name: str) -> bool:
    return bool(os.environ.get(_variable(name)))


def _variable(name: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"


def _check_known(name: str, source: str) -> None:
    if name in Settings.model_fields:
        return
    near = difflib.get_close_matches(name, Settings.model_fields, n=1)
    hint = f"did you mean {near[0]}" if near else f"one of {', '.join(Settings.model_fields)}"
    raise SettingsError(f"{name}: unknown setting in {source} (fix: {hint})")


def _worded(error: ValidationError, flags: Mapping[str, Any], path: Path | None) -> SettingsError:
    """The first complaint in one line, with the place where the value was given."""
    name, given, wish = first_complaint(error)
    if name in flags:
        place = f"--{name.replace('_', '-')}"
    elif _in_environment(name):
        place = _variable(name)
    else:
        place = f"{name} in {path}"
    return SettingsError(f"{name}: {given!r} cannot be used (fix: {place}: {wish})")


def first_complaint(error: ValidationError) -> tuple[str, Any, str]:
    """The key, dotted where tables are nested; what was given; what is wanted."""
    first = error.errors(include_url=False)[0]
    wish = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        wish = "another name, there is no such key"
    return ".".join(map(str, first["loc"])), first["input"], wish
