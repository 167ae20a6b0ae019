"""Times of stages, from one side's stamps of a step, as histograms."""

from collections.abc import Sequence

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.stages import StageSpan
from ipc_handoff.telemetry.attributes import Times
from ipc_handoff.telemetry.catalogue import STAGE, STEP
from ipc_handoff.telemetry.metrics import Metrics

_SECOND = 1e-9


def record_stages(
    metrics: Metrics,
    side: str,
    spans: Sequence[StageSpan],
    times: Times,
    step: int,
    trace: pb.TraceContext | None,
) -> None:
    """Record how long the step took, and the stages of one of its layers.

    One layer a step, in turn: over many steps that says the same as all of them, and a step of 61
    layers costs no more than one of one.

    Args:
        times: [layer ordinal][stage], ns; 0: not reached.
        trace: of the step.
    """
    ended = max(map(max, times), default=0)
    if not ended:
        return
    began = min(at for stamps in times for at in stamps if at)
    metrics.record(STEP, (ended - began) * _SECOND, side, trace)
    stamps = times[step % len(times)]
    for stage in spans:
        if stamps[stage.begin] and stamps[stage.end]:
            took = (stamps[stage.end] - stamps[stage.begin]) * _SECOND
            metrics.record(STAGE, took, stage.name, trace)
