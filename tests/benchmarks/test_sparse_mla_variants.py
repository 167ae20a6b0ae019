"""Variants of sparse MLA that a run on a GPU compares: each is there to be computed."""

from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from attention_worker.kernels.sparse_mla import plan
from tests.benchmarks.conftest import Program


def test_every_variant_changes_what_it_names_and_puts_it_back(program: Program) -> None:
    variants = program("sparse_mla_variants")
    before = dict(vars(plan))
    for question in variants.QUESTIONS.values():
        for variant in question.variants.values():
            with variants.prepared(variant):
                for name, value in variant.plan.items():
                    assert getattr(plan, name) == value
                if variant.source is not None:
                    used = Path(str(import_module(variant.source.module).__file__))
                    assert variant.source.instead in used.read_text()
    assert vars(plan) == before


def test_a_text_that_is_gone_is_an_error(program: Program) -> None:
    source = program("changed_source")
    gone = source.Source("attention_worker.kernels.sparse_mla.plan", "never written", "x")
    with pytest.raises(LookupError, match="stands 0 times"), source.changed(gone):
        pass
