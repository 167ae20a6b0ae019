"""The race lab: every race is caught, by its detector and no other, and clean steps are still."""

import json
from functools import partial

import pytest
from typer.testing import CliRunner

from dsa_indexer_cli.main import app
from dsa_indexer_cli.racelab.clean import CLEAN
from dsa_indexer_cli.racelab.races import PROVOCATIONS
from dsa_indexer_cli.racelab.run import run_lab
from indexer_client import positions, step_findings
from indexer_client.inputs import StepInputs
from ipc_handoff.detectors import Detector
from ipc_handoff.findings import FindingKind
from tests.cli.lines import one_line

# Wide enough that no run of this suite is clean by chance.
CLEAN_STEPS = 50 * len(CLEAN)


def quiet(doing: str) -> None:
    pass


def test_every_race_is_caught_and_clean_steps_raise_no_alarm() -> None:
    result = run_lab(3, CLEAN_STEPS, quiet)
    assert [(race.name, race.caught) for race in result.provoked] == [
        (race.name, 3) for race in PROVOCATIONS
    ]
    assert all(race.stages and race.kind in race.example for race in result.provoked)
    clean = result.clean
    assert (clean.false_alarms, clean.examples) == (0, [])
    assert set(clean.steps.values()) == {50}
    assert clean.compared >= 8
    assert clean.wrong == 0
    assert result.ok


def test_every_kind_of_finding_is_provoked() -> None:
    assert {race.kind for race in PROVOCATIONS} == set(FindingKind)
    assert {race.detector for race in PROVOCATIONS} == set(Detector)


@pytest.mark.parametrize("detector", Detector)
def test_without_its_detector_nobody_catches_a_race(detector: Detector) -> None:
    others = ",".join(one for one in Detector if one is not detector)
    races = [race for race in PROVOCATIONS if race.detector is detector]
    result = run_lab(2, 0, quiet, detectors=others, races=races)
    assert [(race.name, race.caught) for race in result.provoked] == [
        (race.name, 0) for race in races
    ]
    assert not result.ok


def test_a_detector_that_is_wrong_is_seen_in_clean_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    real = positions.wrong_rows

    def one_off(inputs: StepInputs, page_size: int) -> positions.WrongRows:
        return real(inputs, page_size + 1)

    monkeypatch.setattr(step_findings, "wrong_rows", one_off)
    result = run_lab(1, 2 * len(CLEAN), quiet, races=PROVOCATIONS[:1])
    assert result.clean.false_alarms
    assert "bad_slot" in result.clean.examples[0]
    assert not result.ok


def test_the_command_says_so_in_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["racelab", "--provocations", "1", "--clean-steps", "40"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["ok"]
    assert len(found["provoked"]) == len(PROVOCATIONS)
    few = partial(run_lab, detectors="none", races=PROVOCATIONS[:2])
    monkeypatch.setattr("dsa_indexer_cli.racelab.run.run_lab", few)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    assert "0 of 1" in done.output
    assert "2 missed" in done.output


@pytest.mark.parametrize(
    "options",
    [
        ("--device", "tpu"),
        ("--device", "cuda", "--trace-file", "t.jsonl"),
        ("--trace-file", "/nowhere/t.jsonl"),
    ],
)
def test_options_that_cannot_be_used_are_one_line(options: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["racelab", *options])
    assert done.exit_code == 2
    assert "(fix: " in one_line(done.stderr)
