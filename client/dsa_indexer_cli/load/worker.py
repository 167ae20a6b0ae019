"""What a session asks with: on the CPU transport (`host_worker`) or on a GPU (`gpu_worker`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from dsa_indexer_cli.load.steps import PlannedStep, SessionSteps
from indexer_client import StepInputs
from indexer_client.statistics import Statistics

NO_TIME = -1

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """An answer that waits to be compared.

    Attributes:
        query: q and weights of the layer.
        answer: int32 [rows, k], a copy; rows behind the step's are padding.
    """

    number: int
    layer: int
    inputs: StepInputs
    query: tuple[Tensor, Tensor]
    answer: Tensor


@dataclass(frozen=True)
class Ran:
    """How a step went.

    Attributes:
        began, ended: nanoseconds of the monotonic clock.
        layers: nanoseconds of each layer of the geometry, NO_TIME where it is not known.
        inline: layers that the service did not answer, as far as that is known at once.
        forward: nanoseconds that the GPU took for all layers; NO_TIME on a CPU.
        check: the answer that was to be compared, if there is one.
    """

    began: int
    ended: int
    layers: Sequence[int]
    inline: int = 0
    forward: int = NO_TIME
    check: Check | None = None


@dataclass(frozen=True)
class Opened:
    """Attributes:
    placement: where the service works, relative to this worker.
    reasons: why all is as it is.
    """

    placement: str
    reasons: tuple[str, ...] = field(default=())


class Worker(Protocol):
    """Used by one thread of a process of its own.

    Attributes:
        steps: what it runs.
    """

    steps: SessionSteps

    def open(self, tell: Tell) -> Opened:
        """Attach to the service; again after `close`.

        Args:
            tell: told what takes its time.

        Raises:
            IndexerError: there is no service, or it refused.
        """

    def run(self, number: int, planned: PlannedStep, compared: int | None) -> Ran:
        """Run the n-th step.

        Args:
            compared: a layer whose answer is wanted.
        """

    def inline_since(self) -> int:
        """Layers that the service did not answer since this was last asked, besides those that
        `run` has told.
        """

    def compare(self, check: Check) -> str:
        """What is wrong with an answer; empty if nothing is."""

    def gpu_memory(self) -> Mapping[str, float]:
        """MiB in use on each GPU that the session works with, by name, whoever holds them."""

    def close(self) -> Statistics:
        """End the session; what it has counted."""

    def free(self) -> None:
        """Give everything back."""
