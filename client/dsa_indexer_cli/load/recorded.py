"""Steps that an engine recorded (`DSA_INDEXER_RECORD`), as steps of a load test."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dsa_indexer_cli.load.steps import SessionSteps, Shape, drawn_steps, pages_of
from dsa_indexer_cli.load.workload import HEAD_DIM, Workload, WorkloadError
from indexer_client.recording import RECORDING_VERSION
from ipc_handoff.layout import HandoffGeometry


def geometry_of(workload: Workload) -> HandoffGeometry:
    """What its sessions agree on with the service.

    Raises:
        WorkloadError: the recording cannot be read.
    """
    if workload.replay is None:
        return workload.geometry
    return read_recording(workload.replay.file).geometry


@dataclass(frozen=True)
class Recording:
    """What a file holds.

    Attributes:
        seconds: since the recording began, when each step did.
    """

    geometry: HandoffGeometry
    shapes: Sequence[Shape]
    seconds: Sequence[float]


def read_recording(path: Path) -> Recording:
    """Raises WorkloadError: no recording, or of another version."""
    try:
        with path.open(encoding="utf-8") as lines:
            header, *steps = [json.loads(line) for line in lines]
        if header["version"] != RECORDING_VERSION:
            raise WorkloadError(
                f"replay.file: {path} has version {header['version']}, this program reads "
                f"{RECORDING_VERSION} (fix: record with this version)"
            )
        fields = header["geometry"]
        geometry = HandoffGeometry(**{**fields, "layers": tuple(fields["layers"])})
        shapes = [_shape(step) for step in steps]
        seconds = [float(step["seconds"]) for step in steps]
    except OSError as error:
        raise WorkloadError(
            f"replay.file: {path}: {error.strerror} (fix: what DSA_INDEXER_RECORD wrote)"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise WorkloadError(
            f"replay.file: {path} is no recording: {error} (fix: what DSA_INDEXER_RECORD wrote)"
        ) from None
    if not shapes or geometry.head_dim != HEAD_DIM:
        raise WorkloadError(
            f"replay.file: {path} holds no step that can be run (fix: a recording with steps of "
            f"head dimension {HEAD_DIM})"
        )
    return Recording(geometry, shapes, seconds)


def _shape(step: dict[str, Any]) -> Shape:
    """A recorded step's. What only the device knew is taken at its bound, or split evenly."""
    requests, decodes = step["requests"], step["decode_requests"]
    if offsets := step.get("query_start"):
        rows = [after - before for before, after in pairwise(offsets)]
    else:
        left = step["rows"] - decodes * step["rows_per_decode"]
        prefills = requests - decodes
        rows = [step["rows_per_decode"]] * decodes
        rows += [left // prefills + (place < left % prefills) for place in range(prefills)]
    lengths = step.get("seq_lens") or [step["max_length"]] * requests
    return Shape(
        decode_requests=decodes,
        rows_per_decode=step["rows_per_decode"],
        rows=tuple(rows),
        lengths=tuple(max(length, count) for length, count in zip(lengths, rows, strict=True)),
        layers=tuple(step["layers"]),
    )


def steps_of(workload: Workload, seed: int, device: torch.device | None = None) -> SessionSteps:
    """A session's steps, drawn or recorded.

    Args:
        device: of a session on a GPU.

    Raises:
        WorkloadError: the recording cannot be read, or cannot be run on a GPU.
    """
    make = drawn_steps if workload.replay is None else recorded_steps
    return make(workload, seed, device)


def recorded_steps(
    workload: Workload, seed: int, device: torch.device | None = None
) -> SessionSteps:
    """The recorded shapes, in their order, over random keys and queries; see `steps_of`."""
    assert workload.replay is not None
    recording = read_recording(workload.replay.file)
    geometry = recording.geometry
    if device is not None:
        _check_all_layers(recording)
    return SessionSteps(
        geometry,
        recording.shapes,
        seed,
        pages_of(geometry, workload.model.cache_tokens, on_gpu=device is not None),
        seconds=recording.seconds,
        device=device,
    )


def _check_all_layers(recording: Recording) -> None:
    """A step on a GPU is one plan of all layers, and so are its graphs."""
    for number, shape in enumerate(recording.shapes):
        if shape.layers != recording.geometry.layers:
            raise WorkloadError(
                f"replay.file: step {number} asks in {len(shape.layers)} of "
                f"{len(recording.geometry.layers)} layers, and on a GPU a step asks in all (fix: "
                'load.placement="cpu")'
            )
