"""Which configuration of a kernel is the fastest here: measured once, remembered on disk.

`best` measures, and belongs into warm-up; `chosen` is a look-up for the launch path, and never
measures. No selected bit depends on the configuration, so that processes need not agree on it.
"""

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar, cast

import torch

C = TypeVar("C")

logger = logging.getLogger(__name__)

_chosen: dict[Hashable, object] = {}
"""What `best` found in this process. (Its GPUs are taken to be of one kind.)"""


def chosen(operation: str, key: Mapping[str, Hashable], default: C) -> C:
    """What `best` found in this process for the operation and key, or `default`."""
    return cast(C, _chosen.get((operation, frozenset(key.items())), default))


def best(
    operation: str,
    key: Mapping[str, Hashable],
    configurations: Sequence[C],
    time: Callable[[C], float],
    device: torch.device,
) -> C:
    """The fastest configuration; measured only if this machine does not remember it.

    Args:
        operation: name of the kernel's operation.
        key: what of the shapes the choice depends on; values with a lasting `repr`.
        configurations: at least one, each with a lasting `repr`. One that is remembered and no
            longer among them is measured anew.
        time: runs a configuration and returns how long it took, in any one unit. One that raises
            or returns no finite number is left out, with a warning.
        device: that it runs on: other kinds of GPU are remembered apart.

    Raises:
        Exception: what `time` raised, where no configuration runs.
    """
    from indexer_service.kernels import tuned_file  # with pydantic: not on the launch path

    by_name = {repr(configuration): configuration for configuration in configurations}
    text = ", ".join(f"{name}={value!r}" for name, value in sorted(key.items()))
    name = tuned_file.remembered(device, operation, text)
    if name not in by_name:
        name = _fastest(operation, by_name, time)
        tuned_file.remember(device, operation, text, name)
    _chosen[operation, frozenset(key.items())] = by_name[name]
    return by_name[name]


def _fastest(operation: str, by_name: Mapping[str, C], time: Callable[[C], float]) -> str:
    if len(by_name) == 1:
        return next(iter(by_name))
    times: dict[str, float] = {}
    failure: Exception | None = None
    for name, configuration in by_name.items():
        try:
            taken = time(configuration)
            if not math.isfinite(taken):
                raise ValueError(f"took {taken}")
            times[name] = taken
        except Exception as error:
            logger.warning("%s: %s is left out: %s", operation, name, error)
            failure = error
    if not times:
        raise failure or ValueError(f"{operation}: no configuration to choose from")
    return min(times, key=times.__getitem__)
