"""Compiling: in threads while a process warms up, and counted, since nothing may afterwards."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

_MOST_THREADS = 8


def make_together(calls: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Makes the kernels of all calls at once: compilers run outside of Python's lock.

    Calls run in any order. Their errors are left to whoever makes the same calls again. Without a
    GPU nothing is compiled, and nothing is called.
    """
    if device.type != "cuda":
        return

    def one(call: Callable[[], object]) -> None:
        with torch.cuda.device(device), suppress(Exception):
            call()

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(one, calls))


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """The names of kernels that Triton compiles, or loads from its cache on disk, inside.

    A kernel comes once for each specialisation. Either holds up a launch. All threads of the
    process are counted, and counts may be nested. Without Triton there are none.

        with count_compilations() as compiled:
            ...
        assert not compiled
    """
    names: list[str] = []
    try:
        from triton import knobs  # only where kernels are compiled at all
    except ImportError:
        yield names
        return
    before = knobs.runtime.jit_post_compile_hook

    def hook(**told: Any) -> Any:
        names.append(told["fn"].name)
        return before(**told) if before else None

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before
