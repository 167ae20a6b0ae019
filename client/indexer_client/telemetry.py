"""What the worker tells tracing about a step."""

from collections.abc import Mapping

from indexer_client.attachment import Attachment
from indexer_client.inputs import StepInputs
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.stages import WORKER_SPANS, WorkerStage
from ipc_handoff.stamps import StepTimes
from ipc_handoff.telemetry.attributes import Attributes, Times, Value
from ipc_handoff.telemetry.step_trace import StepTrace


def begun_attributes(number: int, inputs: StepInputs) -> Attributes:
    """Of a step that begins; no device value is read."""
    attributes: dict[str, Value] = {
        "dsa.step": number,
        "dsa.rows": inputs.rows,
        "dsa.requests": inputs.requests,
        "dsa.context": inputs.max_length,
    }
    if inputs.request_ids is not None:
        attributes["dsa.request_ids"] = list(inputs.request_ids)
    return attributes


def export_step(
    trace: StepTrace,
    geometry: HandoffGeometry,
    step: int,
    attachment: Attachment | None,
    times: Times | None,
    of_layers: Mapping[int, Attributes],
) -> None:
    """Make the spans of a step that is over: its stages in the worker, and its own.

    Args:
        attachment: None: the step was inline.
        times: [layer ordinal][WorkerStage]; None if they were overwritten, () if there are none.
        of_layers: attributes of a layer's spans.
    """
    trace.attributes |= _place(step, attachment, geometry)
    if times is None:
        trace.event("stamps overwritten", {})
    elif times:
        if isinstance(times, StepTimes) and times.clock_error is not None:
            trace.event("clock", {"dsa.clock_error_ns": times.clock_error})
        own: Attributes = {"dsa.step": step, "dsa.epoch": _epoch(attachment)}
        trace.stages(WORKER_SPANS, times, geometry.layers, own, of_layers=of_layers)
        waited = sum(
            stamps[WorkerStage.WAIT_ENDED] - stamps[WorkerStage.REQUEST_RUNG]
            for stamps in times
            if stamps[WorkerStage.WAIT_ENDED]
        )
        trace.event("waited", {"dsa.wait_ns": waited})
    trace.export()


def _place(step: int, attachment: Attachment | None, geometry: HandoffGeometry) -> dict[str, Value]:
    """Where the step was answered, and from which memory."""
    if attachment is None:
        return {"dsa.epoch": 0, "dsa.placement": "inline"}
    return {
        "dsa.epoch": attachment.epoch,
        "dsa.engine": attachment.engine,
        "dsa.placement": attachment.placement,
        "dsa.bank": attachment.bank.number,
        "dsa.bank_generation": attachment.bank.control.generation,
        "dsa.slot": geometry.staging.slot_of(step),
    }


def _epoch(attachment: Attachment | None) -> int:
    return 0 if attachment is None else attachment.epoch
