"""What the runner tells whoever watches it. Telemetry listens; the runner does not know it."""

from collections.abc import Sequence
from typing import Protocol

from dsa_indexer.v1 import indexer_pb2 as pb


class StepObserver(Protocol):
    """Told of every finished step, from the runner's thread, after its answers are out."""

    def step_finished(
        self,
        plan: pb.StepPlan,
        report: pb.StepReport,
        times: Sequence[Sequence[int]] | None,
        layers: Sequence[int],
    ) -> None:
        """`times` [layer ordinal][ServiceStage], nanoseconds; None if they were overwritten
        or the plan was refused.
        `layers`: the session's layer ids by ordinal."""
