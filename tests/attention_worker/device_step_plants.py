"""Each case of a worker's steps, and each guard taken out: the case that is for it must fail.

`python -m tests.attention_worker.device_step_plants` runs all and prints one JSON line a case: its
name and what went wrong, or null.
"""

import ctypes
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from tests.attention_worker import device_step_cases as cases
from tests.attention_worker.device_step_bench import MANY_ROWS

# isort: split
from attention_worker import device_handoff, inline_kernels
from attention_worker.device_handoff import DeviceHandoff
from ipc_handoff.device_layout import DEVICE_LINE, AnswersWord
from ipc_handoff.kernels.words import Decision, WorkerState
from tests.attention_worker import found_cases, settled_cases
from tests.support.cases import tell


def _always_answered(memory: Any, **options: Any) -> None:
    memory.decision.zero_()
    memory.decision[Decision.ANSWERED] = 1


def _armed_for_good(real: Callable[..., None]) -> Callable[..., None]:
    def stage(memory: Any, *arguments: Any, **options: Any) -> None:
        armed = memory.state[WorkerState.ARMED].clone()
        real(memory, *arguments, **options)
        memory.state[WorkerState.ARMED] = armed

    return stage


def _always_enabled(real: Callable[..., None]) -> Callable[..., None]:
    return lambda *arguments, **options: real(*arguments, **{**options, "enabled": None})


def _own_requests_only(real: Callable[..., None]) -> Callable[..., None]:
    return lambda inputs, numbers, start, lengths, *rest, **options: real(
        inputs, numbers, start, lengths, *rest, **{**options, "bucket": len(lengths)}
    )


def _this_step_only(real: Callable[..., None]) -> Callable[..., None]:
    """The word of the newest step that was given up is looked at as one step's own."""

    def wait(memory: Any, **options: Any) -> None:
        step = int(memory.state[WorkerState.CURRENT])
        if not step:
            real(memory, **options)
            return
        at = int(memory.state[WorkerState.ANSWERS]) + AnswersWord.CANCELLED * DEVICE_LINE
        word = ctypes.c_int64.from_address(at)
        told, word.value = word.value, word.value if word.value == step else 0
        real(memory, **options)
        word.value = told

    return wait


def _another_number(real: Callable[..., None]) -> Callable[..., None]:
    numbers = count(10**6)
    return lambda *arguments, **options: real(
        *arguments, **{**options, "attachment": next(numbers)}
    )


def _first_bank() -> Callable[[Any], Any]:
    seen: list[Any] = []

    def bank(attachment: Any) -> Any:
        seen.append(attachment.bank)
        return seen[0]

    return bank


def _planted() -> Iterator[tuple[str, Callable[[], None], Any, str, Any]]:
    """Name, case, and what is replaced by what."""
    handoff, inline = device_handoff, inline_kernels
    always = _always_answered
    yield "stalled, taken for answered", MANY_ROWS(cases.stalled), handoff, "wait", always
    yield (
        "another step's answer taken",
        MANY_ROWS(cases.answers_of_another_step),
        handoff,
        "wait",
        always,
    )
    yield (
        "a newer step's end not taken for this one's", cases.cancelled_behind_a_newer_one, handoff,
        "wait", _this_step_only(handoff.wait),
    )  # fmt: skip
    yield (
        "inline kernels not switched off", cases.answered_by_the_service_alone, inline,
        "enqueue_step", _always_enabled(inline.enqueue_step),
    )  # fmt: skip
    yield (
        "a publication that stays armed", cases.one_publication_one_forward, handoff, "stage",
        _armed_for_good(handoff.stage),
    )  # fmt: skip
    yield (
        "an unused publication kept", cases.unposted_step_after_an_unused_one, DeviceHandoff,
        "skip", lambda self: None,
    )  # fmt: skip
    yield (
        "published for a lost attachment", cases.lost_is_not_published_for, handoff, "publish",
        _another_number(handoff.publish),
    )  # fmt: skip
    yield "the first bank for ever", cases.another_bank, handoff, "_bank", _first_bank()
    yield (
        "only the step's requests cleared", cases.CASES["padded, inline"], inline, "copy_checked",
        _own_requests_only(inline.copy_checked),
    )  # fmt: skip
    yield "padding left as it was", cases.padded_eager, inline, "_NONE", -2
    yield (
        "a drained service not noticed", cases.the_service_has_drained, DeviceHandoff, "why_over",
        lambda self, attachment: None,
    )  # fmt: skip
    yield (
        "what the device told not read", cases.stalled, DeviceHandoff, "why_over",
        lambda self, attachment: None,
    )  # fmt: skip
    yield from settled_cases.planted()
    yield from found_cases.planted()


if __name__ == "__main__":
    tell(cases.CASES | settled_cases.CASES | found_cases.CASES, _planted())
