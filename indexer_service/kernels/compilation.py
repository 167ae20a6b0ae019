"""How many kernels this process compiled: nothing may, once it is warm."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
