"""Counting compilations, and timing and making kernels, as far as no GPU is needed."""

from types import SimpleNamespace

import pytest
import torch

from indexer_service.kernels.compilation import count_compilations, make_together
from indexer_service.kernels.gpu_time import microseconds

CPU = torch.device("cpu")


def test_compilations_are_counted_also_within_each_other() -> None:
    runtime = pytest.importorskip("triton").knobs.runtime
    before = runtime.jit_post_compile_hook

    def compiled(name: str) -> None:
        runtime.jit_post_compile_hook(fn=SimpleNamespace(name=name), key="any")

    with count_compilations() as outer:
        compiled("first")
        with count_compilations() as inner:
            compiled("second")
        compiled("third")
    assert outer == ["first", "second", "third"]
    assert inner == ["second"]
    assert runtime.jit_post_compile_hook is before


def test_without_a_gpu_nothing_is_made_beforehand() -> None:
    called: list[int] = []
    make_together([lambda: called.append(1)], CPU)
    assert not called


def test_without_a_gpu_the_call_itself_is_timed() -> None:
    called: list[int] = []
    assert microseconds(lambda: called.append(1), CPU) > 0
    assert len(called) == 2
