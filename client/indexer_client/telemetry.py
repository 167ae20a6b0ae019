"""What the worker tells tracing about a step."""

from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.stages import SERVICE_SPANS, WORKER_SPANS, WorkerStage
from ipc_handoff.tracing import StepTrace, Times


def end_step(
    trace: StepTrace,
    geometry: HandoffGeometry,
    attributes: dict[str, str | int | bool | float],
    times: Times | None,
    lost_service_times: Times | None,
    error: BaseException | None,
) -> None:
    """Export the worker's stages of a step, and those of a service that was lost in it.

    Args:
        times: [layer ordinal][WorkerStage]; None if they were overwritten.
        lost_service_times: [layer ordinal][ServiceStage], when the service will not export.
    """
    if times is None:
        trace.event("stamps overwritten", {})
    else:
        trace.stages(WORKER_SPANS, times, geometry.layers, attributes)
        waited = sum(
            stamps[WorkerStage.WAIT_ENDED] - stamps[WorkerStage.REQUEST_RUNG]
            for stamps in times
            if stamps[WorkerStage.WAIT_ENDED]
        )
        trace.event("waited", {"dsa.wait_ns": waited})
    if lost_service_times is not None:
        trace.stages(
            SERVICE_SPANS, lost_service_times, geometry.layers, attributes, incomplete=True
        )
    trace.end(error)
