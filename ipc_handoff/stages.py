"""The stages of a layer's hand-over, and the spans they become.

A stamp is the time at which a stage ended; each side stamps the stages that it executes.
"""

from enum import IntEnum
from typing import NamedTuple


class WorkerStage(IntEnum):
    """Stamped by the worker."""

    STAGE_BEGUN = 0
    REQUEST_RUNG = 1
    WAIT_ENDED = 2
    HANDED_BACK = 3
    """On a GPU also the end of a wait without an answer: the layer is computed behind it."""
    ATTEND_BEGUN = 4
    ATTENDED = 5


class ServiceStage(IntEnum):
    """Stamped by the service. With several windows, the time of the last one."""

    GATE_BEGUN = 0
    GATE_PASSED = 1
    LOGITS_DONE = 2
    TOPK_DONE = 3
    ANSWERED = 4


WORKER_STAGES = tuple(WorkerStage)
SERVICE_STAGES = tuple(ServiceStage)


class StageSpan(NamedTuple):
    """A span between two stamps of one side."""

    name: str
    begin: int
    end: int


PREFIX = "dsa."
"""Of the names of a step's spans; spans of calls have the calls' names."""
STEP_SPAN = "dsa.step"
HOST_CLOCK_TICK = "dsa.host_clock_tick_ns"
"""Attribute of a process: the resolution of its monotonic clock."""
FINDING_EVENT = "dsa.finding"
"""Name of the event, and of its attribute that holds the kind."""
WORKER_SPANS = (
    StageSpan("dsa.stage", WorkerStage.STAGE_BEGUN, WorkerStage.REQUEST_RUNG),
    StageSpan("dsa.handback", WorkerStage.WAIT_ENDED, WorkerStage.HANDED_BACK),
    StageSpan("dsa.attend", WorkerStage.ATTEND_BEGUN, WorkerStage.ATTENDED),
)
SERVICE_SPANS = (
    StageSpan("dsa.gate", ServiceStage.GATE_BEGUN, ServiceStage.GATE_PASSED),
    StageSpan("dsa.logits", ServiceStage.GATE_PASSED, ServiceStage.LOGITS_DONE),
    StageSpan("dsa.topk", ServiceStage.LOGITS_DONE, ServiceStage.TOPK_DONE),
    StageSpan("dsa.answer", ServiceStage.TOPK_DONE, ServiceStage.ANSWERED),
)
