"""Which placement `auto` gives on this host, and what to change for a better one."""

import os
from collections.abc import Sequence

import torch

from attention_worker.placements import Chosen, Placement, choose
from dsa_indexer_cli.children import ChildFailed
from dsa_indexer_cli.doctor_finding import Finding, split_fix
from dsa_indexer_cli.doctor_gpus import (
    PACKAGES,
    allocator_finding,
    another_mps,
    driver_finding,
    gpu_finding,
    has_device_files,
    launches_finding,
    look,
    may_have_gpus,
    mps_finding,
    package_finding,
    peers_finding,
    shared_folder_finding,
    visibility_finding,
)
from dsa_indexer_cli.doctor_handoff import handoff_findings
from dsa_indexer_cli.doctor_host import namespace_findings
from dsa_indexer_cli.gpu_facts import GpuFacts
from ipc_handoff.errors import RegionError

_NO_DEVICE, _OF_MPS = "CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_MPS_"
_NOT_FIRST = "not measured: what fails above comes first"


def placement_findings() -> list[Finding]:
    """The GPUs, a measured hand-over, and last the placement."""
    if not may_have_gpus():
        return [_on_cpu()]
    try:
        facts = look()
    except ChildFailed as error:
        return _without_facts(str(error))
    settings = [
        driver_finding(facts),
        *map(gpu_finding, facts.gpus),
        *map(package_finding, PACKAGES),
        launches_finding(),
    ]
    can_run = all(finding.ok is not False for finding in settings)
    settings.append(allocator_finding())
    mps = mps_finding(facts.gpus[0])
    return [
        *settings,
        visibility_finding(),
        peers_finding(facts),
        mps,
        shared_folder_finding(),
        *namespace_findings(),
        *(handoff_findings(facts) if can_run else [Finding("hand-over", None, _NOT_FIRST)]),
        _placement(facts, [*settings, mps]),
    ]


def _on_cpu() -> Finding:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if shown is None else f" (CUDA_VISIBLE_DEVICES is {shown!r})"
    return Finding(
        "placement", True, f"cpu: no GPU is visible here{hidden}", values={"placement": "cpu"}
    )


def _without_facts(error: str) -> list[Finding]:
    if _NO_DEVICE in error or not has_device_files():
        return [_on_cpu()]
    problem, fix = split_fix(error)
    if _OF_MPS in problem:
        fix = another_mps()
    fix = fix or "nvidia-smi and a CUDA program must work here first"
    inline = "inline: nothing can be said of the GPUs"
    return [
        Finding("GPU", False, problem, fix),
        Finding("placement", False, inline, f"1. {fix}", {"placement": "inline"}),
    ]


def _placement(facts: GpuFacts, looked_at: Sequence[Finding]) -> Finding:
    chosen = _chosen(facts)
    steps = _steps(facts, chosen, looked_at)
    return Finding(
        "placement",
        not chosen.is_refusal,
        f"{chosen.placement}: {split_fix(chosen.reason)[0]}",
        "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1)),
        {
            "placement": str(chosen.placement),
            "service_device": chosen.service_device,
            "steps": steps,
        },
    )


def _chosen(facts: GpuFacts) -> Chosen:
    """For a worker on the first GPU; with a service on another one if both cannot run at once."""
    worker = torch.device("cuda", 0)
    try:
        chosen = choose(Placement.AUTO, worker)
        takes_turns = chosen.placement is Placement.TIMESLICE
        for peer in facts.gpus[0].peers[:1] if chosen.is_refusal or takes_turns else ():
            other = choose(Placement.AUTO, worker, peer)
            chosen = chosen if other.is_refusal else other
    except RegionError as error:
        return Chosen(Placement.INLINE, None, str(error), is_refusal=True)
    return chosen


def _steps(facts: GpuFacts, chosen: Chosen, looked_at: Sequence[Finding]) -> list[str]:
    """What to do, in order: what is wrong first, then what gives a better placement."""
    *settings, mps = looked_at
    steps = [finding.fix for finding in settings if finding.ok is False]
    if chosen.placement is not Placement.PEER_GPU and mps.fix:
        steps.append(f"mps: {mps.fix}")
    steps += [
        f"peer_gpu, where GPU {peer} can be the service's own: dsa-indexer serve "
        f"--device cuda:{peer}, and service_device={peer} for the worker"
        for peer in facts.gpus[0].peers[:1]
    ]
    return list(dict.fromkeys(steps))
