"""A frozen service is replaced under its address, and thaws while its successor works."""

import random
import time
from functools import partial
from pathlib import Path

import pytest

from indexer_client import ClientSettings, IndexerError
from indexer_client.control_plane import ControlPlane
from ipc_handoff.banks import ANSWERS, HostBank
from tests.e2e.conftest import Start
from tests.support.processes import left_in, nothing_mapped
from tests.support.runs import Run, later, running
from tests.support.waiting import SOON, eventually

LONGEST_MOMENT = 0.08
WAIT_BOUND = 0.2
# Of calls to a service that freezes.
CALLS = {"rpc_timeout_seconds": 1.0}


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
    control_plane = ControlPlane(settings.model_copy(update={"rpc_timeout_seconds": SOON}))
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
    settings = client_settings.model_copy(update={**CALLS, "signalling": signalling})
    moment, frozen = partial(moments.uniform, 0, LONGEST_MOMENT), start()
    with running(settings, moments.randrange(2**20)) as run:
        pool = run.session._caretaker._pool
        run.attached_steps()
        for _ in range(3):
            assert run.session._attachment is not None
            for bank in (run.session._attachment.bank, *pool._free):
                _poison(bank)
            before = run.freeze_in_use(frozen, WAIT_BOUND, moment)
            successor = start()
            run.attached_steps()
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
    settings = client_settings.model_copy(update={**CALLS, "banks": 1})
    frozen = start()
    with running(settings, 4) as run:
        run.attached_steps()
        frozen.freeze()
        run.until_detached(WAIT_BOUND)
        successor = start()
        assert eventually(lambda: "banks" in str(run.session.last_error))
        run.step()
        assert run.session.epoch is None
        frozen.thaw()
        run.attached_steps()
        attachment = run.session._attachment
        # The thawed one may have been asked first; then it is left for its successor.
        assert attachment is not None
        assert attachment.watch.pid in (frozen.pid, successor.pid)
    run.checker.assert_right()
