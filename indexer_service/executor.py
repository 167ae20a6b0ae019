"""What a runner drives: something that takes plans one after the other and answers their steps."""

from typing import Protocol

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.stamps import StepTimes


class StepCancelled(Exception):
    """The rest of the step is given up; the message says why."""


class DeviceLost(Exception):
    """The GPU's context is gone for the whole process; the message says what was seen of it."""


class BegunStep(Protocol):
    """One step that was begun. Steps end in the order in which they began."""

    def is_finished(self) -> bool:
        """Whether `finish` would not wait for others' work. Never blocks."""

    def finish(self) -> None:
        """Say in the step's report what was done, also when it raises.

        Raises:
            ServiceError: the plan is refused; nothing was read.
            StepCancelled: nobody wants the step any more, or its data did not come in time.
        """

    def times(self) -> StepTimes | None:
        """Of its stages, after `finish`; None if they were overwritten, none if nobody asked."""


class Executor(Protocol):
    """Used by its runner's thread, but for `interrupt` and `regions_changed`.

    Attributes:
        last_step: the newest step that was begun; 0 before the first.
        most_in_flight: steps that may be begun and not finished.
        spin_seconds: so long after its last work, the runner looks again without sleeping.
        lost_stamps: steps whose stamps were overwritten before they were read.
    """

    last_step: int
    most_in_flight: int
    spin_seconds: float

    @property
    def lost_stamps(self) -> int: ...

    def prepare(self) -> None:
        """Make what the first step needs, before any is begun; may take long."""

    def prepare_more(self) -> bool:
        """While nothing is in flight: one piece of what later steps need; whether there was any."""

    def begin(self, plan: pb.StepPlan, report: pb.StepReport) -> BegunStep:
        """Begin a step; `report` is filled when it is finished.

        Raises:
            ServiceError: the plan is refused; nothing was read.
        """

    def give_up(self, step: int) -> None:
        """Tell the worker that this step is not answered and not touched any more."""

    def interrupt(self) -> None:
        """Let what was begun end soon. From any thread."""

    def regions_changed(self) -> None:
        """Let go of every K cache. From any thread, while no step is in flight."""

    def drain(self) -> None:
        """Interrupt, and return once every step that was begun is finished."""

    def close(self) -> None:
        """Let go of everything, after `drain`.

        Raises:
            DeviceLost: the GPU is; everything is let go of.
        """
