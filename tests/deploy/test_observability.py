"""Compose file and collector of deploy/observability: valid, pinned, and they find each other."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from opentelemetry.sdk import environment_variables

from tests.deploy.observability import OBSERVABILITY, PROMETHEUS, data_sources
from tests.deploy.programs import COMPOSE, compose
from tests.deploy.test_agreement import KNOWN

FILES = [OBSERVABILITY / "compose.yaml", OBSERVABILITY / "service.yaml", COMPOSE]
OURS = yaml.safe_load(FILES[0].read_text())
LAID_OVER = yaml.safe_load(FILES[1].read_text())
COLLECTOR = yaml.safe_load((OBSERVABILITY / "collector.yaml").read_text())
SCRAPED = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())["scrape_configs"]
# Where each image listens, unless its configuration says something else.
PORTS = {"prometheus": {9090}, "grafana": {3000}}


def complaints(*files: Path) -> str:
    """Of the compose specification's schema; "" if there are none."""
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.compose-spec", *map(str, files)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def test_the_compose_files_are_valid(tmp_path: Path) -> None:
    assert complaints(*FILES) == ""
    planted = tmp_path / "compose.yaml"
    planted.write_text(FILES[0].read_text().replace("depends_on", "depend_on"))
    assert "depend_on" in complaints(planted)


def test_images_are_pinned_and_ports_are_on_loopback() -> None:
    for name, service in OURS["services"].items():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["cap_drop"] == ["ALL"] and not service.get("privileged")


def test_what_is_mounted_is_there() -> None:
    named = set(OURS["volumes"])
    for service in OURS["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in named or (OBSERVABILITY / source).exists(), volume
            assert source in named or volume.endswith(":ro"), volume


def test_the_service_starts_with_it_and_is_told_where_to_send() -> None:
    (included,) = OURS["include"]
    assert [(OBSERVABILITY / path).resolve() for path in included["path"]] == [COMPOSE, FILES[1]]
    assert OURS["name"] == compose()["name"]
    assert not OURS["services"].keys() & compose()["services"].keys()
    assert LAID_OVER["services"].keys() <= compose()["services"].keys()
    of_sdk = {value for value in vars(environment_variables).values() if isinstance(value, str)}
    for service in LAID_OVER["services"].values():
        assert service["environment"].keys() <= KNOWN | of_sdk
        assert {"DSA_INDEXER_TRACE_RATIO", "OTEL_EXPORTER_OTLP_ENDPOINT"} <= set(
            service["environment"]
        )


def listening() -> dict[str, set[int]]:
    """Ports of each container."""
    tempo = yaml.safe_load((OBSERVABILITY / "tempo.yaml").read_text())
    received = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    (reader,) = COLLECTOR["service"]["telemetry"]["metrics"]["readers"]
    ends = (
        COLLECTOR["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"],
        COLLECTOR["exporters"]["prometheus"]["endpoint"],
    )
    return PORTS | {
        "tempo": {tempo["server"]["http_listen_port"], _port(received)},
        "collector": {*map(_port, ends), reader["pull"]["exporter"]["prometheus"]["port"]},
    }


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def addresses() -> list[str]:
    """Every `host:port` by which one container asks another."""
    found = [COLLECTOR["exporters"]["otlp_grpc"]["endpoint"]]
    found += [urlsplit(source["url"]).netloc for source in data_sources()]
    for service in LAID_OVER["services"].values():
        found.append(urlsplit(service["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]).netloc)
    for job in SCRAPED:
        for fixed in job.get("static_configs", []):
            found += [target.replace("localhost", job["job_name"]) for target in fixed["targets"]]
    return found


@pytest.mark.parametrize("address", sorted(set(addresses())))
def test_an_address_is_one_that_a_container_listens_at(address: str) -> None:
    host, _, port = address.partition(":")
    assert host in OURS["services"]
    assert int(port) in listening()[host]


def test_published_ports_are_those_that_are_listened_at() -> None:
    for name, service in OURS["services"].items():
        assert {_port(port) for port in service["ports"]} <= listening()[name]


def unconnected(collector: dict[str, Any]) -> list[str]:
    """What a pipeline names and nobody defines, and the other way round."""
    found = []
    pipelines = collector["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        used = {name for pipeline in pipelines for name in pipeline.get(kind, [])}
        found += sorted(f"{kind}: {name}" for name in used ^ collector[kind].keys())
    return found


def test_the_collectors_pipelines_are_connected() -> None:
    assert unconnected(COLLECTOR) == []
    assert COLLECTOR["service"]["pipelines"].keys() == {"metrics", "traces"}
    for pipeline in COLLECTOR["service"]["pipelines"].values():
        assert pipeline["processors"] == ["memory_limiter", "batch"]
    planted = {**COLLECTOR, "exporters": {"prometheus": {}, "otlp": {}}}
    assert unconnected(planted) == ["exporters: otlp", "exporters: otlp_grpc"]


def test_the_collector_has_only_what_its_image_has() -> None:
    """The core distribution of 0.159.0, by its manifest."""
    assert OURS["services"]["collector"]["image"] == "otel/opentelemetry-collector:0.159.0"
    assert COLLECTOR["receivers"].keys() <= {"otlp", "prometheus"}
    assert COLLECTOR["processors"].keys() <= {"memory_limiter", "batch", "resource", "filter"}
    assert COLLECTOR["exporters"].keys() <= {"prometheus", "otlp_grpc", "otlp_http", "debug"}


def test_exemplars_travel_all_the_way() -> None:
    """In the one format that has them, and into a store that is switched on."""
    assert COLLECTOR["exporters"]["prometheus"]["enable_open_metrics"] is True
    assert "--enable-feature=exemplar-storage" in OURS["services"]["prometheus"]["command"]
    (collected,) = [job for job in SCRAPED if job["job_name"] == "dsa-indexer"]
    assert collected["honor_labels"] is True  # `job` and `instance` are the process's


def test_a_process_is_forgotten_later_than_it_speaks() -> None:
    expires = int(COLLECTOR["exporters"]["prometheus"]["metric_expiration"].removesuffix("m")) * 60
    for service in LAID_OVER["services"].values():
        assert int(service["environment"]["OTEL_METRIC_EXPORT_INTERVAL"]) / 1000 * 3 < expires
