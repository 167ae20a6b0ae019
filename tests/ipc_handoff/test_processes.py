"""Proof that a process is dead."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from ipc_handoff.processes import ProcessWatch
from tests.ipc_handoff.support import peer
from tests.support.descriptors import no_descriptor_leaks
from tests.support.waiting import SOON, eventually


def test_a_killed_process_is_dead_and_a_living_one_is_not() -> None:
    with peer("send_nothing") as child:
        assert child.hear() == "alive"
        watch = ProcessWatch(child.pid)
        assert not watch.is_dead()
        child.process.send_signal(signal.SIGKILL)
        assert eventually(watch.is_dead)
    assert watch.is_dead()
    watch.close()


def test_a_zombie_is_dead() -> None:
    """Nobody has to reap it first: a zombie's memory is gone, so it writes nothing any more."""
    with peer("send_nothing") as child:
        watch = ProcessWatch(child.pid)
        os.kill(child.pid, signal.SIGKILL)
        assert eventually(watch.is_dead)
        with open(f"/proc/{child.pid}/stat") as stat:
            assert stat.read().rsplit(")", 1)[1].split()[0] == "Z"
        with open(f"/proc/{child.pid}/maps") as maps:
            assert maps.read() == ""
        late = ProcessWatch(child.pid)
        assert late.is_dead()
        late.close()
    watch.close()


def test_a_stopped_process_is_not_dead() -> None:
    with peer("send_nothing") as child:
        watch = ProcessWatch(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(0.05)
        assert not watch.is_dead()
        os.kill(child.pid, signal.SIGCONT)
        assert not watch.is_dead()
    assert watch.is_dead()
    watch.close()


def test_a_process_whose_main_thread_ended_is_not_dead() -> None:
    with peer("outlive_the_main_thread") as child:
        watch = ProcessWatch(child.pid)
        assert child.hear() == "main thread is gone"
        with open(f"/proc/{child.pid}/stat") as stat:
            assert stat.read().rsplit(")", 1)[1].split()[0] == "Z"
        assert not watch.is_dead()
        os.kill(child.pid, signal.SIGKILL)
        assert eventually(watch.is_dead)
    watch.close()


def reaped_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_reaped_process_is_dead_on_arrival() -> None:
    with no_descriptor_leaks():
        watch = ProcessWatch(reaped_pid())
        assert watch.is_dead()
        assert watch.fileno() is None
        watch.close()


@pytest.mark.parametrize("pid", [0, -1])
def test_a_process_that_cannot_be_named_is_never_proven_dead(pid: int) -> None:
    with no_descriptor_leaks():
        watch = ProcessWatch(pid)
        assert not watch.is_dead()
        assert watch.fileno() is None
        watch.close()


def test_a_watch_stays_with_its_process_when_the_pid_is_another_s() -> None:
    """The proof stands on the descriptor: signals and look-ups by pid play no part."""
    with peer("send_nothing") as child:
        watch = ProcessWatch(child.pid)
    watch.pid = os.getpid()
    assert watch.is_dead()
    watch.close()


class ByPid(ProcessWatch):
    """Planted: asks whether anybody has the pid."""

    def is_dead(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False


def test_planted_watch_by_pid_takes_another_process_for_the_dead_one() -> None:
    with peer("send_nothing") as child:
        watch = ByPid(child.pid)
    watch.pid = os.getpid()  # as after a reuse of the number
    assert not watch.is_dead()
    watch.close()


def test_death_wakes_a_sleeper() -> None:
    with peer("send_nothing") as child:
        watch = ProcessWatch(child.pid)
        descriptor = watch.fileno()
        assert descriptor is not None
        assert not select.select([descriptor], [], [], 0)[0]
        child.process.kill()
        assert select.select([descriptor], [], [], SOON)[0]
    watch.close()


def test_closed_without_a_leak_and_never_a_proof_afterwards() -> None:
    with peer("send_nothing") as child, no_descriptor_leaks():
        watch = ProcessWatch(child.pid)
        watch.close()
        watch.close()
        assert watch.fileno() is None
        assert not watch.is_dead()
    assert not watch.is_dead()


def test_a_system_without_pidfds_gives_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old container runtimes filter the call; then the bank stays retired."""

    def filtered(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", filtered)
    watch = ProcessWatch(os.getpid())
    assert not watch.is_dead()
    assert watch.fileno() is None
