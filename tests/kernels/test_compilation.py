"""Counting compilations, and timing and making kernels, as far as no GPU is needed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from indexer_service.kernels.compilation import count_compilations, make_together
from indexer_service.kernels.gpu_time import microseconds

CPU = torch.device("cpu")


def compiled(name: str) -> None:
    runtime = pytest.importorskip("triton", reason="Triton exists on Linux only").knobs.runtime
    if runtime.jit_post_compile_hook:
        runtime.jit_post_compile_hook(fn=SimpleNamespace(name=name), key="any")


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What somebody else's hook, which was there before, is told; it is there again afterwards."""
    runtime = pytest.importorskip("triton", reason="Triton exists on Linux only").knobs.runtime
    names: list[str] = []

    def hook(**arguments: Any) -> None:
        names.append(arguments["fn"].name)

    before, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, hook
    yield names
    assert runtime.jit_post_compile_hook is hook
    runtime.jit_post_compile_hook = before


def test_compilations_are_counted_also_within_each_other(told: list[str]) -> None:
    with count_compilations() as outer:
        compiled("first")
        with count_compilations() as inner:
            compiled("second")
        compiled("third")
    compiled("fourth")
    assert outer == ["first", "second", "third"]
    assert inner == ["second"]
    assert told == ["first", "second", "third", "fourth"]


def test_counts_of_two_threads_may_end_in_any_order(told: list[str]) -> None:
    first, second = count_compilations(), count_compilations()
    earlier = first.__enter__()
    with ThreadPoolExecutor(1) as other:
        later = other.submit(second.__enter__).result()
        compiled("of both")
        first.__exit__(None, None, None)
        compiled("of the later")
        other.submit(second.__exit__, None, None, None).result()
    compiled("of neither")
    assert earlier == ["of both"]
    assert later == ["of both", "of the later"]
    assert told == ["of both", "of the later", "of neither"]


def test_without_a_gpu_nothing_is_made_beforehand() -> None:
    called: list[int] = []
    make_together([lambda: called.append(1)], CPU)
    assert not called


def test_without_a_gpu_the_call_itself_is_timed() -> None:
    called: list[int] = []
    assert microseconds(lambda: called.append(1), CPU) > 0
    assert len(called) == 2
