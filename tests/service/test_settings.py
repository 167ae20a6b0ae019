"""Settings: which source wins, and errors that name field, place and fix in one line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from indexer_service.settings import Settings, SettingsError, load


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*Settings.model_fields, "config"):
        monkeypatch.delenv(f"DSA_INDEXER_{name.upper()}", raising=False)
    yield


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "indexer.toml"
    path.write_text('lease_seconds = 3\nqueued_steps = 4\nworkspace_bytes = "64MiB"\n')
    return path


def test_defaults() -> None:
    settings = load()
    assert settings.address.startswith("unix:")
    assert (settings.lease_seconds, settings.max_sessions, settings.queued_steps) == (10, 64, 64)
    assert (settings.gate_bound_seconds, settings.shutdown_grace_seconds) == (1, 10)
    assert (settings.max_message_bytes, settings.workspace_bytes) == (4 << 20, 256 << 20)
    assert (settings.engine, settings.device) == ("auto", "cpu")


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSA_INDEXER_LEASE_SECONDS", "5")
    monkeypatch.setenv("DSA_INDEXER_QUEUED_STEPS", "6")
    settings = load({"lease_seconds": "7", "engine": None}, config)
    assert settings.lease_seconds == 7
    assert settings.queued_steps == 6
    assert settings.workspace_bytes == 64 << 20
    assert settings.engine == "auto"


def test_the_environment_names_the_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_INDEXER_CONFIG", str(config))
    assert load().lease_seconds == 3


def test_an_empty_variable_counts_as_unset(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_INDEXER_LEASE_SECONDS", "")
    assert load(config=config).lease_seconds == 3


def test_settings_of_other_parts_are_no_settings_of_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSA_INDEXER_FORCE_ARCH", "80")
    load()


FILE_CASES = {
    "unknown key": ("lease_second = 1", "lease_second: ", "did you mean lease_seconds"),
    "nothing like it": ("zzz = 1", "zzz: ", "one of address"),
    "a table": ("[engine]\nname = 1", "engine: ", "engine in"),
    "not TOML": ("lease_seconds 3", "config: ", "valid TOML"),
    "not text": ("lease_seconds = '\udcff'", "config: ", "valid TOML"),
    "wrong type": ("queued_steps = 'many'", "queued_steps: ", "valid integer"),
    "out of range": ("trace_ratio = 2", "trace_ratio: ", "less than or equal to 1"),
    "not a number": ("lease_seconds = nan", "lease_seconds: ", "less than"),
    "unknown device": ("device = 'gpu'", "device: ", "cuda"),
    "a size below its minimum": ("workspace_bytes = '1KiB'", "workspace_bytes: ", "1048576"),
}


@pytest.mark.parametrize("case", FILE_CASES)
def test_a_bad_file(case: str, tmp_path: Path) -> None:
    content, start, part = FILE_CASES[case]
    path = tmp_path / "bad.toml"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert_refused(start, part, config=path)


def test_a_bad_flag_is_named_as_flag() -> None:
    assert_refused("lease_seconds: ", "--lease-seconds", flags={"lease_seconds": "soon"})


def test_a_bad_variable_is_named_as_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_INDEXER_MAX_SESSIONS", "0")
    assert_refused("max_sessions: ", "DSA_INDEXER_MAX_SESSIONS")


def test_an_unknown_flag() -> None:
    assert_refused("colour: ", "the flags", flags={"colour": "red"})


def test_a_file_that_is_not_there() -> None:
    assert_refused("config: ", "No such file", config=Path("/nowhere.toml"))


def assert_refused(start: str, part: str, **sources: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        load(**sources)
    message = str(caught.value)
    assert message.startswith(start), message
    assert part in message and "(fix: " in message, message
    assert "\n" not in message


def test_the_docs_name_every_setting(repository: Path) -> None:
    text = (repository / "docs" / "service.md").read_text()
    assert [name for name in Settings.model_fields if f"`{name}`" not in text] == []
