"""Which executor answers an attachment's steps: that of the memory in which its bank lies."""

from functools import partial

from indexer_service.attachment import Attachment, HostViews
from indexer_service.engine import Engine
from indexer_service.runner import MakeExecutor
from indexer_service.step_executor import StepExecutor
from ipc_handoff.detectors import Detection


def executor_of(
    attachment: Attachment,
    engine: Engine,
    gate_bound_seconds: float,
    detection: Detection,
    *,
    stamped: bool,
) -> MakeExecutor:
    """How a runner makes the executor of `attachment`.

    Args:
        gate_bound_seconds: longest wait for one word.
        detection: the detectors that are on, and whom they tell.
        stamped: somebody observes steps, and is told when their stages ended.
    """
    if isinstance(attachment.bank, HostViews):
        return partial(
            StepExecutor,
            attachment,
            attachment.bank,
            engine,
            gate_bound_seconds,
            detection=detection,
        )
    from indexer_service.device_executor import DeviceExecutor  # Triton: only where it is used

    return partial(
        DeviceExecutor,
        attachment,
        attachment.bank,
        engine,
        gate_bound_seconds,
        stamped,
        detection=detection,
    )
