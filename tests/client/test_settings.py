"""The client's settings, from arguments and from the environment."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from indexer_client import ClientSettings
from indexer_client.control_plane import check_tls
from indexer_service.settings import Settings


def test_every_field_comes_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "address": "unix:/run/x/i.sock",
        "engine": "cpu-reference",
        "signalling": "stream",
        "placement": "timeslice",
        "wait_bound_seconds": 0.25,
        "rpc_timeout_seconds": 7.5,
        "register_timeout_seconds": 75.0,
        "reattach_seconds": 3.0,
        "banks": 4,
        "detectors": "inputs,waits",
        "client_tls_certificate": Path("/c.pem"),
        "client_tls_key": Path("/k.pem"),
        "client_tls_server_ca": Path("/a.pem"),
        "trace_file": Path("/t.jsonl"),
        "trace_console": True,
        "trace_ratio": 0.5,
        "trace_slow_seconds": 0.5,
        "worker_metrics_port": 9000,
        "metrics_host": "0.0.0.0",
        "record": Path("/r.jsonl"),
    }
    assert values.keys() == ClientSettings.model_fields.keys()
    for name, value in values.items():
        monkeypatch.setenv(f"DSA_INDEXER_{name.upper()}", str(value))
    assert ClientSettings().model_dump() == values


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_INDEXER_BANKS", "4")
    assert ClientSettings(banks=3).banks == 3


def test_the_services_variables_do_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_INDEXER_LEASE_SECONDS", "3")
    for name in ("TLS_CERTIFICATE", "TLS_KEY", "TLS_CLIENT_CA"):
        monkeypatch.setenv(f"DSA_INDEXER_{name}", "/of/the/service.pem")
    check_tls(ClientSettings())
    assert not any("tls" in name and value for name, value in ClientSettings())


def test_no_variable_of_the_clients_tls_is_one_of_the_services() -> None:
    of_both = ClientSettings.model_fields.keys() & Settings.model_fields.keys()
    assert not [name for name in of_both if "tls" in name]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("signalling", "smoke"),
        ("placement", "moon"),
        ("wait_bound_seconds", 0),
        ("rpc_timeout_seconds", -1),
        ("register_timeout_seconds", 0),
        ("reattach_seconds", 0),
        ("banks", 0),
        ("trace_ratio", 1.5),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        ClientSettings(**{field: value})
    assert caught.value.errors()[0]["loc"] == (field,)


@pytest.mark.parametrize("variable", [None, ""], ids=["unset", "empty"])
def test_the_default_address_is_a_private_socket(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is None:
        monkeypatch.delenv("DSA_INDEXER_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("DSA_INDEXER_ADDRESS", variable)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert ClientSettings().address == "unix:/run/user/7/dsa-indexer/indexer.sock"
