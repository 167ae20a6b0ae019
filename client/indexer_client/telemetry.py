"""What the worker tells tracing about a step."""

from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.stages import SERVICE_SPANS, WORKER_SPANS, WorkerStage
from ipc_handoff.tracing import Attributes, StepTrace, Times


def end_step(
    trace: StepTrace,
    geometry: HandoffGeometry,
    step: int,
    epoch: int,
    times: Times | None,
    error: BaseException | None,
) -> None:
    """Export the worker's stages of a step, and end its span.

    Args:
        epoch: 0 without an attachment.
        times: [layer ordinal][WorkerStage]; None if they were overwritten.
    """
    if times is None:
        trace.event("stamps overwritten", {})
    else:
        trace.stages(WORKER_SPANS, times, geometry.layers, _attributes(step, epoch))
        waited = sum(
            stamps[WorkerStage.WAIT_ENDED] - stamps[WorkerStage.REQUEST_RUNG]
            for stamps in times
            if stamps[WorkerStage.WAIT_ENDED]
        )
        trace.event("waited", {"dsa.wait_ns": waited})
    trace.end(error)


def lost_service_stages(
    trace: StepTrace, geometry: HandoffGeometry, step: int, epoch: int, times: Times
) -> None:
    """Export the stages of a service that will not do it any more.

    Args:
        times: [layer ordinal][ServiceStage].
    """
    attributes = _attributes(step, epoch)
    trace.stages(SERVICE_SPANS, times, geometry.layers, attributes, incomplete=True)


def _attributes(step: int, epoch: int) -> Attributes:
    return {"dsa.step": step, "dsa.epoch": epoch}
