"""What a service's kernels find in a step. Run by `device_step_cases`, which sets Triton up."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from indexer_service import step_kernels
from indexer_service.step_kernels import tensor_at
from ipc_handoff.device_layout import DEVICE_LINE, AnswersWord, SlotLine
from ipc_handoff.findings import FindingKind
from ipc_handoff.generations import Generation
from ipc_handoff.kernels.service_memory import ServiceMemory
from tests.service.device_step_bench import CPU, GEOMETRY, Bench


def another_layer_is_staged_meanwhile() -> None:
    """The worker did not wait for its answer: the next layer comes over the one that is scored."""
    bench = Bench()
    step = bench.worker.make([1, 1], [100, 50])
    real = step_kernels.enqueue_step

    def overtaken(*arguments: Any, **options: Any) -> None:
        bench.worker.stage(step, 1)
        real(*arguments, **options)

    with patch.object(step_kernels, "enqueue_step", overtaken):
        report = bench.run(step, staged=1)
    assert not report.answered_layers
    assert report.message.startswith("overwritten_before_read: "), report.message
    assert int(bench.word(bench.worker.answers, AnswersWord.DONES)) == 0
    assert int(bench.word(bench.worker.answers, AnswersWord.CANCELLED)) == step.plan.step
    found = bench.found.only
    kind = FindingKind.OVERWRITTEN_BEFORE_READ
    assert (found.kind, found.stage, found.layer) == (kind, "dsa.logits", 3)
    assert (found.expected, found.seen) == ("step 1, layer 3", "step 1, layer 7")


def inputs_of_a_later_step() -> None:
    """They are being written over those that are copied; the word that says so is still right."""
    bench = Bench()
    step = bench.worker.make([1, 1], [100, 50])
    real = step_kernels.copy_checked

    def overtaken(*arguments: Any, **options: Any) -> None:
        at = bench.worker.staging + GEOMETRY.device.staging_at(step.plan.step % GEOMETRY.slots)
        word = tensor_at(at + SlotLine.INPUTS * DEVICE_LINE, (1,), torch.int64, CPU)
        word.fill_(Generation(step.plan.step + GEOMETRY.slots, 0, is_written=False).word)
        real(*arguments, **options)

    with patch.object(step_kernels, "copy_checked", overtaken):
        report = bench.run(step)
    assert not report.answered_layers
    found = bench.found.only
    assert (found.kind, found.stage) == (FindingKind.OVERWRITTEN_BEFORE_READ, "dsa.gate")
    assert (found.expected, found.seen) == ("step 1", f"step {1 + GEOMETRY.slots}, being written")


def nan_scores() -> None:
    bench = Bench()
    step = bench.worker.make([1, 1, 2], [100, 50, 90], decode=2)
    step.weights[1][3] = torch.nan
    report = bench.run(step)
    assert list(report.answered_layers) == [3, 7]
    found = bench.found.only
    assert (found.kind, found.stage, found.layer) == (FindingKind.NAN_SCORES, "dsa.logits", 7)
    assert (found.row, found.request) == (3, "#2")
    step = bench.worker.make([1, 1], [100, 50])
    bench.check(step, bench.run(step))
    assert len(bench.found.findings) == 1, "told again, of a step that had none"


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (another_layer_is_staged_meanwhile, inputs_of_a_later_step, nan_scores)
}


def planted() -> Iterator[tuple[str, Callable[[], None], Any, str, Any]]:
    """Name, case, and what is replaced by what."""
    blind = property(lambda self: lambda slot: 0)
    for case in (another_layer_is_staged_meanwhile, inputs_of_a_later_step):
        yield (
            f"whose data it is not looked at: {case.__name__}",
            case,
            ServiceMemory,
            "looked_at",
            blind,
        )
    yield "scores are not looked at", nan_scores, step_kernels, "NanSeen", lambda word: None
