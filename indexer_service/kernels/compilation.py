"""Compiling: in threads while a process warms up, and counted, since nothing may afterwards."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

import torch

from indexer_service.kernels.architecture import on, processors, sized_for
from indexer_service.kernels.launchers import make_one_at_a_time

_MOST_THREADS = 8

_lock = Lock()
_counts: list[list[str]] = []
"""The counts under way, of any thread: Triton has one hook, which the first of them puts in place
and the last one takes away, in whatever order they end.
"""
_before: Any = None
"""The hook that was there before ours."""


def make_together(calls: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Makes the kernels of all calls at once: compilers run outside of Python's lock.

    Calls run in any order. Their errors are left to whoever makes the same calls again. Without a
    GPU nothing is compiled, and nothing is called.
    """
    if device.type != "cuda":
        return

    make_one_at_a_time()
    size = processors(device)  # as this thread sizes its kernels

    def one(call: Callable[[], object]) -> None:
        with on(device), sized_for(size), suppress(Exception):
            call()

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(one, calls))


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """The names of kernels that Triton compiles, or loads from its cache on disk, inside.

    A kernel comes once for each specialisation. Either holds up a launch. All threads of the
    process are counted, and counts may overlap. Without Triton there are none.

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
    _begin(names, knobs.runtime)
    try:
        yield names
    finally:
        _end(names, knobs.runtime)


def _begin(names: list[str], runtime: Any) -> None:
    global _before
    with _lock:
        if not _counts:
            _before = runtime.jit_post_compile_hook
            runtime.jit_post_compile_hook = _count
        _counts.append(names)


def _end(names: list[str], runtime: Any) -> None:
    with _lock:
        # (Lists that hold the same names are equal.)
        _counts[:] = [others for others in _counts if others is not names]
        if not _counts:
            runtime.jit_post_compile_hook = _before


def _count(**told: Any) -> Any:
    with _lock:
        for names in _counts:
            names.append(told["fn"].name)
        before = _before
    return before(**told) if before else None
