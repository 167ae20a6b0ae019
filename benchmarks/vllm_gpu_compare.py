"""What must be the same in the vLLM comparison, and how far the rest may be apart."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from vllm_gpu_cases import Case

NATIVE = "FLASHMLA_SPARSE"
LOG_PROBABILITY = 0.05
"""Median difference of a prompt token's, to vLLM's own backend: the model is chaotic."""

OVERLAP = 0.99
"""Share of the first layer's selection that vLLM's own has too: scores that are nearly equal fall
on either side of the last place. Later layers have other inputs."""

ATTENTION = 0.02
"""Relative error of the first layer's attention output: bf16, and another order of summation."""

Found = dict[str, dict[str, Any]]


def complaints(found: Found, cases: Mapping[str, Case]) -> list[str]:
    """What does not compare as it must; also notes in `found` how far apart cases are."""
    said = failures(found, cases)
    done = {name: each for name, each in found.items() if "failed" not in each}
    for name, each in done.items():
        case = cases[name]
        if case.is_ours and each["decode"] != each["again"]:
            said.append(f"{name}: does not repeat its own bits")
        if case.same_as in done:
            said += [
                f"{name}: {what} differs in bits from {case.same_as}"
                for what in ("prefill", "decode")
                if each[what] != done[case.same_as][what]
            ]
            one, two = samples(each), samples(done[case.same_as])
            said += [
                f"{name}: {what} differ in bits from {case.same_as}"
                for what in (one or {})
                if one and two and not torch.equal(one[what], two[what])
            ]
        if case.service is not None:
            said += [f"{name}: {fault}" for fault in unserved(each["statistics"])]
        native = done.get(NATIVE)
        if native is not None and case.gpus == 1:
            said += [f"{name}: {fault}" for fault in far_apart(each, native)]
    return said


def after_kills(found: Found, cases: Mapping[str, Case]) -> list[str]:
    """What is not as it must be after `kills`."""
    if said := failures(found, cases):
        return said
    inline, remote = found.values()
    for what in ("load", "load, again"):
        if remote[what] != inline["load"]:
            said.append(f"{what} differs in bits from inline")
    before, after = remote["after the kill"][0][0], remote["statistics"][0][0]
    if before["detachments"] < 1 or not before["answered_layers"]:
        said.append(f"the service was not killed among steps: {before}")
    if not remote["attached again"] or after["answered_layers"] <= before["answered_layers"]:
        said.append(f"no service was taken again: {after}")
    return said


def failures(found: Found, _: Mapping[str, Case]) -> list[str]:
    """Engines that did not do what they were asked."""
    return [f"{name}: {each['failed']}" for name, each in found.items() if "failed" in each]


def unserved(workers: list[list[dict[str, Any]]]) -> list[str]:
    """What of an undisturbed engine's layers did not come from its service."""
    return [
        f"rank {rank}: {counts}"
        for rank, sessions in enumerate(workers)
        for counts in sessions or [{"sessions": 0}]
        if not counts.get("answered_layers") or counts["inline_layers"]
    ]


def far_apart(mine: dict[str, Any], native: dict[str, Any]) -> list[str]:
    """What is farther from vLLM's own than it may be."""
    pairs = zip(chain(*mine["prefill"]), chain(*native["prefill"]), strict=True)
    apart = round(median(abs(one - two) for one, two in pairs), 5)
    mine["log-probability difference"] = apart
    said = []
    if apart > LOG_PROBABILITY:
        said.append(f"prompts' log-probabilities are {apart} off")
    one, two = samples(mine), samples(native)
    if one is None or two is None:
        return said
    mine["overlap"] = overlaps(one["selections"], two["selections"])
    mine["attention error"] = round(relative_error(one["attention"][0], two["attention"][0]), 5)
    if mine["overlap"][0] < OVERLAP:
        said.append(f"the first layer's selections share {mine['overlap'][0]}")
    if mine["attention error"] > ATTENTION:
        said.append(f"the first layer's attention is {mine['attention error']} off")
    return said


def samples(each: dict[str, Any]) -> dict[str, Tensor] | None:
    """What was kept of a case's prefill."""
    path = each.get("samples")
    if not path or not Path(path).exists():
        return None
    kept: dict[str, Tensor] = torch.load(path)
    return kept


def overlaps(mine: Tensor, other: Tensor) -> list[float]:
    """Of each layer: the mean share of a row's selection that is in the other's too.

    Args:
        mine, other: int32 [layers, rows, k], in any order, negative: none.
    """
    found = []
    for one, two in zip(mine.tolist(), other.tolist(), strict=True):
        shares = []
        for row, also in zip(one, two, strict=True):
            chosen, known = ({index for index in each if index >= 0} for each in (row, also))
            shares.append(len(chosen & known) / max(len(chosen | known), 1))
        found.append(round(sum(shares) / len(shares), 5))
    return found


def relative_error(mine: Tensor, other: Tensor) -> float:
    """Norm of the difference, by the norm of the other."""
    return float((mine.double() - other.double()).norm() / other.double().norm())
