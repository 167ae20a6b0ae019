"""Each guard of the hand-over's kernels is taken out of a copy of the source: a run must fail."""

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from tests.gates.conftest import Results
from tests.gates.jobs import Change, Job

# As in test_gates.
pytestmark = pytest.mark.timeout(900)

_SEEN_BY = ("AssertionError", "StrayAccess", "Race")
"""A check of the run's, or the watch that it is interpreted under."""

_TOPK = "indexer_service/kernels/topk/kernel.py"

GUARDS = [
    ("tell.py", "is_ours = look(line(staging, DETACHED), PTX) == 0", "is_ours = step > -1",
     "tell nobody"),
    ("tell.py", "(look(line(staging, PUBLISHED), PTX) == step)", "(step > -1)", "tell nobody"),
    ("tell.py", "    if is_ours:\n        for", "    if step > -1:\n        for", "give up"),
    ("flag.py", "if look(line(tl.load(state + ANSWERS), GIVEN_UP), PTX) >= step:", "if step < 0:",
     "flag of a step that was given up"),
    ("gate.py", "if look(at, PTX) == step:", "if look(at, PTX) != 0:", "PUBLISHED ends: LATE"),
    ("gate.py", "if look(line(staging, PUBLISHED), PTX) != step:", "if step < 0:",
     "FIRST_LAYER ends: NEWER"),
    ("gate.py", "tl.store(live + LIVE, (end == PASSED).to(tl.int32))", "tl.store(live + LIVE, 1)",
     "LAYER ends: LATE"),
    ("done.py", "if tl.load(live + LIVE) != 0:", "if made > 0:", "LAYER ends: LATE"),
    ("wait.py", "if look(done, PTX) == step:", "if look(done, PTX) != 0:", "a stalled wait"),
    ("wait.py", "look(line(answers, CANCELLED), PTX) >= step",
     "look(line(answers, CANCELLED), PTX) == step", "and the next one too"),
    ("wait.py", "tl.store(decision + IS_DETACHED, 1)", "pass", "a cancelled step"),
    ("wait.py", "mask=inside & (row < rows) & answered", "mask=inside & (row < rows)",
     "a stalled wait that would hand back"),
    ("hand_back.py", "(row < rows) & answered", "(row < rows)", "a stalled wait"),
    ("hand_back.py", "(row < rows) & answered", "answered", "many rows handed back"),
    ("hand_back.py", "(step != 0) & (row < step_rows)", "row < step_rows",
     "forwards without a publication"),
    ("done.py", "if last_to_arrive(arrived, programs):", "if programs > 0:",
     "told by top-k, rows"),
    (_TOPK, "if on & ends:", "if ends:", "told by top-k, a step that was given up"),
    (_TOPK, "ends = ends | (source != NOTHING)", "ends = split >= 0", "told by top-k, rows that"),
    (_TOPK, "ends = ends | ((split == 0) & (origin < 0))", "pass",
     "told by top-k, a row of another window"),
    ("publish.py", "is_lost = tl.load(state + LOST) == attachment", "is_lost = attachment < 0",
     "a stalled wait"),
    ("publish.py", "other=-1", "other=0", "answered steps"),
    ("stage.py", "tl.store(state + ARMED, 0)", "pass", "forwards without a publication"),
]  # fmt: skip
"""File (in ipc_handoff/kernels where no folder is named), what stands there, what is put in its
place, and a run that must see it.
"""


def _without(file: str, guard: str, without: str, run: str) -> Job:
    path = file if "/" in file else f"ipc_handoff/kernels/{file}"
    return Job("tests.gates.interpret", (run,), (Change(path, guard, without),))


@pytest.mark.parametrize(
    "job",
    [pytest.param(_without(*row), id=f"{row[0]}-{row[1]}-{row[3]}") for row in GUARDS],
)
def test_a_guard_taken_out_is_seen(job: Job, results: Results) -> None:
    runs = results(job)
    assert runs
    errors = [str(run["error"]) for run in runs if run["error"]]
    assert errors
    assert all(any(name in error for name in _SEEN_BY) for error in errors), errors
