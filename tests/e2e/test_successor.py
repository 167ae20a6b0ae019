"""A frozen service is replaced under its address, and thaws while its successor works."""

import random
import time
from pathlib import Path

import pytest

from indexer_client import ClientSettings, IndexerError
from indexer_client.control_plane import ControlPlane
from ipc_handoff.banks import ANSWERS, HostBank
from tests.e2e.conftest import Start
from tests.support.processes import left_in, nothing_mapped
from tests.support.runs import SOON, Run, later, running
from tests.support.waiting import eventually

LONGEST_MOMENT = 0.08


def _poison(bank: HostBank) -> None:
    """Indices in range, so that they look like answers."""
    view = bank.memories[ANSWERS].view().cast("B")
    view[:] = bytes([7, 0, 0, 0]) * (len(view) // 4)


def _contents(bank: HostBank) -> list[bytes]:
    return [bytes(memory.view()) for memory in bank.memories.values()]


def _settled(bank: HostBank) -> list[bytes]:
    """Contents once the last step's report is written, which comes behind its answers."""
    while True:
        before = _contents(bank)
        time.sleep(0.1)
        if _contents(bank) == before:
            return before


def _serving_pid(settings: ClientSettings) -> int:
    control_plane = ControlPlane(settings)
    try:
        return control_plane.get_status().pid
    except IndexerError:
        return 0
    finally:
        control_plane.close()


def _steps(run: Run, count: int) -> None:
    for _ in range(count):
        run.step()


@pytest.mark.parametrize("signalling", ["ring", "stream"])
def test_the_frozen_one_writes_only_into_its_retired_bank(
    signalling: str,
    start: Start,
    client_settings: ClientSettings,
    moments: random.Random,
    socket: Path,
) -> None:
    settings = client_settings.model_copy(
        update={"wait_bound_seconds": 0.2, "signalling": signalling}
    )
    frozen = start(lease_seconds=1.0)
    with running(settings, moments.randrange(2**20)) as run:
        pool = run.session._caretaker._pool
        run.attached_steps(SOON)
        for _ in range(3):
            before = run.session._attachment
            assert before is not None
            for bank in (before.bank, *pool._free):
                _poison(bank)
            timer = later(moments.uniform(0, LONGEST_MOMENT), frozen.freeze)
            run.until_detached()
            timer.join()
            successor = start(lease_seconds=1.0)
            run.attached_steps(2.0 + settings.rpc_timeout_seconds)
            after = run.session._attachment
            assert after is not None
            assert after.bank is not before.bank
            assert after.watch.pid == successor.pid
            assert pool.retired == 1

            untouched = _settled(after.bank)
            thawing = later(moments.uniform(0, 0.01), frozen.thaw)
            if moments.random() < 0.5:
                # Nothing runs here meanwhile: what changes now was changed by the thawed one.
                thawing.join()
                assert eventually(before.bank.control.bells.is_drained, SOON)
                time.sleep(0.05)
                assert _contents(after.bank) == untouched
            _steps(run, 5)
            assert eventually(lambda: pool.retired == 0, SOON)
            assert run.session._attachment is after
            thawing.join()
            # Nobody will ever come to it again, so it ends by itself.
            assert frozen.wait() == 0
            # It removed nothing of its successor's.
            assert _serving_pid(settings) == successor.pid
            _steps(run, 2)
            assert run.session._attachment is after
            frozen = successor
    run.checker.assert_right()
    assert eventually(lambda: nothing_mapped(frozen))
    assert frozen.stop() == 0
    assert left_in(socket.parent) == []


def test_without_a_free_bank_the_worker_stays_inline_until_the_frozen_one_has_drained(
    start: Start, client_settings: ClientSettings
) -> None:
    settings = client_settings.model_copy(update={"wait_bound_seconds": 0.2, "banks": 1})
    frozen = start()
    with running(settings, 4) as run:
        run.attached_steps(SOON)
        frozen.freeze()
        run.until_detached()
        successor = start()
        time.sleep(1.0)
        run.step()
        assert run.session.epoch is None
        assert "banks" in str(run.session.last_error)
        frozen.thaw()
        run.attached_steps(3.0)
        attachment = run.session._attachment
        # The thawed one may have been asked first; then it is left for its successor.
        assert attachment is not None
        assert attachment.watch.pid in (frozen.pid, successor.pid)
    run.checker.assert_right()
