"""The rules: valid for Prometheus, they fire when they should, and say what to do."""

import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.observability import PROMETHEUS, RULES, alerts, metric_queries, rules
from tests.deploy.prometheus import needs_promtool, promtool

CASES = Path(__file__).parent / "rules_test.yaml"


@needs_promtool
def test_prometheus_takes_rules_and_configuration() -> None:
    for command in (["check", "rules", str(RULES)], _check_configuration(PROMETHEUS)):
        status, said = promtool(*command)
        assert status == 0, said


def _check_configuration(folder: Path) -> list[str]:
    return ["check", "config", str(folder / "prometheus.yaml")]


@needs_promtool
def test_a_misspelt_key_is_seen(tmp_path: Path) -> None:
    text = (PROMETHEUS / "prometheus.yaml").read_text()
    (tmp_path / "prometheus.yaml").write_text(text.replace("honor_labels", "honour_labels"))
    (tmp_path / "rules.yaml").write_text(RULES.read_text())
    status, said = promtool(*_check_configuration(tmp_path))
    assert status != 0 and "honour_labels" in said


@needs_promtool
def test_queries_of_panels_are_promql(tmp_path: Path) -> None:
    """Each as a rule, since promtool reads those."""
    written = [
        {"record": f"panel:{number}", "expr": asked.expression}
        for number, asked in enumerate(metric_queries())
    ]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": written}]}))
    status, said = promtool("check", "rules", "--lint=none", str(path))
    assert status == 0, said
    written[0]["expr"] += ")"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": written}]}))
    assert promtool("check", "rules", "--lint=none", str(path))[0] != 0


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    status, said = promtool("test", "rules", str(CASES))
    assert status == 0, said


@needs_promtool
@pytest.mark.parametrize(
    ("there", "planted"),
    [
        ('{kind!~"nan_scores|wait_ended"}[10m])\n          ) > 0', "[10m])\n          ) > 0"),
        ("ratio5m > 0.05\n        for: 5m", "ratio5m > 0.05\n        for: 30m"),
        ('status=~"failed|rejected"', 'status=~"cancelled|failed|rejected"'),
        ("dsa_indexer_sessions == 0", "dsa_indexer_sessions == 1"),
        ("absent(dsa_indexer_sessions)", "absent(up)"),
    ],
)
def test_a_planted_fault_in_a_rule_is_seen(there: str, planted: str, tmp_path: Path) -> None:
    text = RULES.read_text()
    assert text.count(there) == 1
    (tmp_path / "rules.yaml").write_text(text.replace(there, planted))
    cases = yaml.safe_load(CASES.read_text())
    cases["rule_files"] = ["rules.yaml"]
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases))
    assert promtool("test", "rules", str(tmp_path / "cases.yaml"))[0] != 0


def test_every_alert_is_tested_both_ways() -> None:
    """Firing, and silent."""
    checks = [
        check
        for group in yaml.safe_load(CASES.read_text())["tests"]
        for check in group["promql_expr_test"]
    ]
    for alert in alerts():
        of_alert = [check for check in checks if re.search(rf"\b{alert['alert']}\b", check["expr"])]
        assert any(check["exp_samples"] for check in of_alert), alert["alert"]
        assert any(not check["exp_samples"] for check in of_alert), alert["alert"]


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are linked to."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_an_alert_says_what_is_wrong_and_what_to_do(repository: Path) -> None:
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names)
    for alert in alerts():
        assert alert["labels"]["severity"] in ("critical", "warning")
        told = alert["annotations"]
        assert told.keys() == {"summary", "description", "runbook"}
        assert len(told["summary"]) < 100 < len(told["description"])
        page, _, anchor = told["runbook"].partition("#")
        assert anchor in anchors(repository / page), told["runbook"]


def test_the_docs_have_every_alert_and_no_other(repository: Path) -> None:
    text = (repository / "docs" / "observability.md").read_text()
    assert set(re.findall(r"\bDsaIndexer\w+", text)) == {alert["alert"] for alert in alerts()}


def test_what_is_recorded_is_named_as_is_the_custom() -> None:
    """level:metric:operation."""
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    assert recorded and all(name.count(":") == 2 for name in recorded)
