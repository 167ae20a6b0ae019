"""Every kernel of the project with its tuned configurations: what the gates without a GPU run over.

A kernel joins by adding `Build`s here (compiled for each architecture) and `Run`s in a module that
`runs` names (interpreted, checked against a reference, and watched for stray accesses and races).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120, 121)

SHARED_LIMIT = {
    arch: 1024 * size
    for arch, size in zip(ARCHITECTURES, (163, 99, 99, 227, 227, 227, 99, 99), strict=True)
}
"""Bytes of shared memory that a program can have."""

_BUILDS = (
    "tests.gates.builds_handoff",
    "tests.gates.builds_flags",
    "tests.gates.builds_rescue",
    "tests.gates.builds_sparse_mla",
    "tests.gates.builds_k_cache",
    "tests.gates.builds_paged_logits",
    "tests.gates.builds_ragged_logits",
    "tests.gates.builds_topk",
    "tests.gates.builds_device_inputs",
)
_RUNS = (
    "tests.gates.runs_handoff",
    "tests.gates.runs_generations",
    "tests.gates.runs_flags",
    "tests.gates.runs_told",
    "tests.gates.runs_rescue",
    "tests.gates.runs_sparse_mla",
    "tests.gates.runs_gluon_attention",
    "tests.gates.runs_k_cache",
    "tests.gates.runs_ragged_logits",
    "tests.gates.runs_paged_logits",
    "tests.gates.runs_topk",
    "tests.gates.runs_indexer",
    "tests.gates.runs_device_inputs",
    "tests.gates.runs_large",
    "tests.gates.runs_peer_faults",
    "tests.gates.runs_recorded",
)


@dataclass(frozen=True)
class Build:
    """A kernel with constants: one thing to compile."""

    name: str
    kernel: str
    """module:function"""
    types: dict[str, str]
    """Triton's name of every argument's type; arguments left out are constants."""
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    architectures: tuple[int, ...] = ARCHITECTURES
    unaligned: tuple[str, ...] = ()
    """Pointers of which 16-byte alignment is not known."""


@dataclass(frozen=True)
class Run:
    """Inputs on which the interpreted kernel's answer is compared with the reference's."""

    name: str
    check: Callable[[], None]
    """Calls the operation and asserts that the answer is right."""


def modules() -> set[str]:
    """The names of the modules that `builds` and `runs` read."""
    return {*_BUILDS, *_RUNS}


def builds() -> Iterator[Build]:
    for module in _BUILDS:
        yield from import_module(module).BUILDS


def runs() -> Iterator[Run]:
    for module in _RUNS:
        yield from import_module(module).RUNS
