"""A session's steps as lines of JSON: plans and shapes, which `dsa-indexer load` can replay.

The first line is the session's geometry. No token, prompt, query, weight, key or page number is
written, nor the name of a model or request: only how many rows there were, and how long.
"""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TextIO

from indexer_client.inputs import StepInputs
from ipc_handoff.layout import HandoffGeometry

logger = logging.getLogger(__name__)

RECORDING_VERSION = 1


class Recorder:
    """Appends steps to a file of its own, a line each, and stops at the first that cannot be
    written: an engine goes on when a disk is full.

    Args:
        path: the file; if it exists, `path.1` and so on: sessions of one environment share the
            setting, and no recording is overwritten.

    Raises:
        ValueError: the file cannot be made.
    """

    def __init__(self, path: Path, geometry: HandoffGeometry) -> None:
        self._file: TextIO | None = _new_file(path)
        self._began = time.monotonic()
        self._write({"version": RECORDING_VERSION, "geometry": asdict(geometry)})

    def step(self, inputs: StepInputs, layers: Sequence[int]) -> None:
        """Note a step that begins now. Reads nothing from a device."""
        step: dict[str, object] = {
            "seconds": round(time.monotonic() - self._began, 6),
            "rows": inputs.rows,
            "requests": inputs.requests,
            "decode_requests": inputs.decode_requests,
            "rows_per_decode": inputs.rows_per_decode,
            "max_length": inputs.max_length,
            "layers": list(layers),
        }
        if inputs.exact_seq_lens is not None:
            step["seq_lens"] = list(inputs.exact_seq_lens)
        if inputs.exact_query_start is not None:
            step["query_start"] = list(inputs.exact_query_start)
        self._write(step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, value: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(value, separators=(",", ":")) + "\n")
        except OSError as error:
            logger.warning("record: %s: %s; recording ends", self._file.name, error)
            self._file = None


def _new_file(path: Path) -> TextIO:
    for number in count():
        name = path if number == 0 else path.with_name(f"{path.name}.{number}")
        try:
            return name.open("x", buffering=1, encoding="utf-8")
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(
                f"record: {name}: {error.strerror} (fix: a file in a folder that can be written)"
            ) from None
    raise AssertionError("count() does not end")
