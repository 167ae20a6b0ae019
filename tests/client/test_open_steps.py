"""One step is open at a time: what it waits on must not be given away under it."""

from pathlib import Path

import pytest
import torch

from indexer_client import Source
from tests.support.plants import pair
from tests.support.waiting import SOON


def test_a_step_inside_a_step_is_refused_and_the_outer_one_is_right(tmp_path: Path) -> None:
    with pair(tmp_path) as running:
        case = running.case()
        inner = running.session.step(case.inputs, case.layers)
        with running.session.step(case.inputs, case.layers) as step:
            with pytest.raises(RuntimeError, match=r"^session: step 1 is open \(fix: "), inner:
                raise AssertionError("entered")
            running.checker.run(step, case)
        assert set(running.checker.last) == {Source.SERVICE}
        assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()


def test_a_step_that_is_made_inside_another_releases_nothing(tmp_path: Path) -> None:
    """Not even when the attachment has ended: the outer step still reads its bank."""
    with pair(tmp_path) as running:
        case = running.case()
        with running.session.step(case.inputs, case.layers) as step:
            attachment = running.session._attachment
            assert attachment is not None
            attachment.detach("planted")
            running.session.step(case.inputs, case.layers)
            assert running.session._attachment is attachment
            running.checker.run(step, case)
        running.step()
        running.session.wait_attached(SOON)
        assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()


def test_select_once_inside_a_step_is_refused(tmp_path: Path) -> None:
    with pair(tmp_path) as running:
        case = running.case()
        layer, query = next(iter(case.queries.items()))
        out = torch.full_like(case.expected[layer], -2)
        with running.session.step(case.inputs, case.layers) as step:
            with pytest.raises(RuntimeError, match="is open"):
                running.session.select_once(layer, query.q, query.weights, case.inputs, out=out)
            running.checker.run(step, case)
        running.session.select_once(layer, query.q, query.weights, case.inputs, out=out)
        assert torch.equal(out, case.expected[layer])
        running.checker.assert_right()


def test_a_step_that_failed_to_begin_is_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(tmp_path) as running:
        case = running.case()
        step = running.session.step(case.inputs, case.layers)
        with monkeypatch.context() as patch:
            patch.setattr(step, "_plan", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError), step:
                raise AssertionError("entered")
        assert set(running.step()) == {Source.SERVICE}
