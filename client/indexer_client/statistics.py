"""What a session has done so far."""

from dataclasses import dataclass


@dataclass
class Statistics:
    """Counts since the session was made.

    Attributes:
        steps: ended.
        answered_layers: selections that came from the service.
        inline_layers: selections computed in the worker.
        cancelled_steps: steps that a healthy service gave up.
        attachments, detachments: began, ended otherwise than by `close`.
        faulted_rows: rows that the service could not trust and answered with -1.
        rejected_steps: plans that the service refused.
        lost_stamps: traced steps of which one side's stages were overwritten before they were
            exported.
    """

    steps: int = 0
    answered_layers: int = 0
    inline_layers: int = 0
    cancelled_steps: int = 0
    attachments: int = 0
    detachments: int = 0
    faulted_rows: int = 0
    rejected_steps: int = 0
    lost_stamps: int = 0
