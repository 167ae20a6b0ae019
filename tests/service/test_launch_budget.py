"""A thread that launches waits while too much of it is not done, and others run meanwhile."""

import threading

from indexer_service.launch_budget import LaunchBudget
from tests.service.fake_stream import FakeMark, FakeStream
from tests.support.waiting import SOON, eventually


def test_launches_wait_for_the_oldest_ones() -> None:
    marks: list[FakeMark] = []
    stream = FakeStream(None)  # type: ignore[arg-type]

    def mark() -> FakeMark:
        marks.append(FakeMark(stream, done=False))
        return marks[-1]

    budget = LaunchBudget(mark)
    spent: list[int] = []

    def launch() -> None:
        for number in range(700):
            budget.spend(1)
            spent.append(number)

    thread = threading.Thread(target=launch)
    thread.start()
    assert eventually(lambda: len(marks) == 9)
    assert not eventually(lambda: len(spent) > 9 * 64, 0.1)
    for done in marks[:2]:
        done.done = True
    thread.join(SOON)
    assert len(spent) == 700


def test_what_is_done_costs_nothing() -> None:
    stream = FakeStream(None)  # type: ignore[arg-type]
    budget = LaunchBudget(stream.mark)
    for _ in range(5000):
        budget.spend(3)
