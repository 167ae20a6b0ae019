"""Dashboards and what provisions them: consistent in themselves, and with each other."""

import json
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from ipc_handoff.stages import SERVICE_SPANS, WORKER_SPANS
from tests.deploy.observability import (
    GRAFANA,
    OBSERVABILITY,
    Json,
    dashboards,
    data_sources,
    panels,
)

DASHBOARDS = dashboards()
SOURCES = {source["uid"]: source for source in data_sources()}
# What Grafana 13 has, of what is used here.
KINDS = {"timeseries", "stat", "bargauge", "heatmap", "table", "text"}
UNITS = {"ops", "percentunit", "short", "s", "bytes", "none"}


def test_the_files_are_what_the_generator_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make dashboards` was run."""
    monkeypatch.syspath_prepend(OBSERVABILITY / "dashboards")
    import build

    build.build(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in build.FOLDER.iterdir()}


def test_there_are_three_and_each_is_one() -> None:
    assert {d["uid"] for d in DASHBOARDS.values()} == {
        "dsa-indexer-overview",
        "dsa-indexer-anatomy",
        "dsa-indexer-races",
    }
    assert len({dashboard["title"] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_are_complete(name: str) -> None:
    everything = DASHBOARDS[name]["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    shown = panels(DASHBOARDS[name])
    assert len({panel["title"] for panel in shown}) == len(shown)
    for panel in shown:
        assert panel["type"] in KINDS
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["description"].endswith(".")
        assert panel["type"] == "text" or panel["targets"]
        letters = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(letters)) == len(letters)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_panel_lies_over_another(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def _sources_used(node: object) -> list[Json]:
    """Every reference to a data source, at whatever depth."""
    if isinstance(node, list):
        return [found for item in node for found in _sources_used(item)]
    if not isinstance(node, dict):
        return []
    own = [node["datasource"]] if "datasource" in node else []
    return own + [found for item in node.values() for found in _sources_used(item)]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_data_sources_are_those_that_are_provisioned(name: str) -> None:
    dashboard = DASHBOARDS[name]
    variables = {v["name"]: v for v in dashboard["templating"]["list"]}
    for source in _sources_used(dashboard):
        variable = variables[re.fullmatch(r"\$\{(\w+)\}", source["uid"]).group(1)]
        chosen = SOURCES[variable["current"]["value"]]
        assert chosen["type"] == variable["query"] == source["type"]
        assert chosen["name"] == variable["current"]["text"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_is_there(name: str) -> None:
    dashboard = DASHBOARDS[name]
    known = {variable["name"] for variable in dashboard["templating"]["list"]}
    own = json.dumps(dashboard["panels"])
    used = set(re.findall(r"\$\{?(?!__)(\w+)", own))
    assert used <= known
    assert known - used <= {"metrics", "traces"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_links_lead_to_dashboards_and_their_variables(name: str) -> None:
    by_uid = {dashboard["uid"]: dashboard for dashboard in DASHBOARDS.values()}
    for panel in panels(DASHBOARDS[name]):
        for link in [*panel["links"], *panel["fieldConfig"]["defaults"].get("links", [])]:
            url = urlsplit(re.sub(r"\$\{[^}]*\}", "x", link["url"]))
            target = by_uid[url.path.removeprefix("/d/")]
            known = {variable["name"] for variable in target["templating"]["list"]}
            assert {key.removeprefix("var-") for key in parse_qs(url.query)} <= known | {"x"}
    (link,) = DASHBOARDS[name]["links"]
    assert all(set(link["tags"]) <= set(d["tags"]) for d in DASHBOARDS.values())


def test_metrics_lead_to_traces_and_back() -> None:
    (prometheus,) = [s for s in SOURCES.values() if s["type"] == "prometheus"]
    (leads,) = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    # The name that the collector gives to an exemplar's trace.
    assert leads["name"] == "trace_id"
    assert SOURCES[leads["datasourceUid"]]["type"] == "tempo"
    (tempo,) = [s for s in SOURCES.values() if s["type"] == "tempo"]
    assert SOURCES[tempo["jsonData"]["tracesToMetrics"]["datasourceUid"]] is prometheus
    tags = {t["key"]: t["value"] for t in tempo["jsonData"]["tracesToMetrics"]["tags"]}
    assert tags == {"service.name": "job", "service.instance.id": "instance"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_what_shows_latency_leads_to_traces(name: str) -> None:
    for panel in panels(DASHBOARDS[name]):
        if panel["type"] in ("heatmap", "timeseries"):
            targets = panel["targets"]
            if any("_seconds_bucket" in target["expr"] for target in targets):
                assert any(target["exemplar"] for target in targets), panel["title"]


def test_the_anatomy_shows_every_stage() -> None:
    (shown,) = [p for p in panels(DASHBOARDS["anatomy.json"]) if p["title"] == "p99 now"]
    stages = [re.search(r'stage="([^"]+)"', t["expr"]).group(1) for t in shown["targets"]]
    assert sorted(stages) == sorted(span.name for span in (*WORKER_SPANS, *SERVICE_SPANS))


def test_dashboards_lie_where_the_provider_looks() -> None:
    path = GRAFANA / "provisioning" / "dashboards" / "dashboards.yaml"
    (provider,) = yaml.safe_load(path.read_text())["providers"]
    compose = yaml.safe_load((OBSERVABILITY / "compose.yaml").read_text())
    grafana = compose["services"]["grafana"]
    mounted = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    folder = provider["options"]["path"]
    assert mounted["./grafana/dashboards"] == folder
    assert mounted["./grafana/provisioning"] == "/etc/grafana/provisioning"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/overview.json" and "overview.json" in DASHBOARDS
