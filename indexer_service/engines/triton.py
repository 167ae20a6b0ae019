"""The Triton engine: the kernels of this repository on one GPU."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from indexer_service.engine import EngineSettings, LayerInputs
from indexer_service.engines.selection import prove, select
from indexer_service.errors import precondition
from indexer_service.executor import StepCancelled
from indexer_service.kernels.architecture import beside_a_wait, sized_for
from indexer_service.kernels.configuration import TRITON, Configuration, configuration
from indexer_service.kernels.geometry import Geometry
from indexer_service.kernels.launchers import make_one_at_a_time
from indexer_service.kernels.warm_up import warm_up
from ipc_handoff.cuda_runtime import launches_block
from ipc_handoff.layout import HandoffGeometry

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_BLOCKING = "CUDA_LAUNCH_BLOCKING"


class TritonEngine:
    """See `indexer_service.engine.Engine`.

    Attributes:
        device: of all sessions. workspace: bytes for temporaries of one window.
    """

    configuration: Configuration

    def __init__(self, settings: EngineSettings) -> None:
        self.device = settings.device
        self.workspace = settings.workspace_bytes
        self.configuration = configuration(TRITON, self.device)
        self._prepared: set[Geometry] = set()
        make_one_at_a_time()  # each session's thread may make some
        # Tuning times kernels: two at once would time each other.
        self._one_at_a_time = threading.Lock()

    def check_session(self) -> None:
        """
        Raises:
            ServiceError: FAILED_PRECONDITION where a session's steps would hold up its thread.
        """
        if launches_block():
            raise precondition(
                _BLOCKING,
                "is set in the service: it would wait on the host for every gate",
                "unset it, and start the service again",
            )

    def warm_up(self) -> None:
        prove(self.select, 64, self.device)

    def select(
        self, inputs: LayerInputs, top_k: int, out: Tensor, on_stage: Callable[[str], None]
    ) -> None:
        """Reads lengths on the host: for the proof above and for tools, not for steps."""
        select(inputs, top_k, out, on_stage, workspace=self.workspace, impl=TRITON)

    def prepare(
        self,
        geometry: HandoffGeometry,
        caches: Sequence[Tensor],
        rows_per_decode: int,
        is_closing: Callable[[], bool],
    ) -> None:
        """Compile and tune all kernels of a session's steps, once for each shape of sessions.

        On a stream of its own: steps of other sessions go on, and have priority.

        Args:
            caches: the session's K caches.
            rows_per_decode: of its decode steps.
            is_closing: to be asked between pieces of work.

        Raises:
            StepCancelled: it is.
        """

        def go_on(done: int, of: int, what: str) -> None:
            if is_closing():
                raise StepCancelled("the session is closing")

        for shape in _shapes(geometry, caches, rows_per_decode, self.workspace):
            while not self._one_at_a_time.acquire(timeout=_LOOK_SECONDS):
                go_on(0, 0, "")
            try:
                if shape in self._prepared:
                    continue
                stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
                with torch.cuda.stream(stream), sized_for(beside_a_wait(self.device)):
                    report = warm_up(shape, self.device, progress=go_on)
                self._prepared.add(shape)
            finally:
                self._one_at_a_time.release()
            logger.info(
                "%d kernels made in %.1f s for %d heads, %d rows a decode request",
                report.kernels,
                report.seconds,
                geometry.heads,
                rows_per_decode,
            )


def _shapes(
    geometry: HandoffGeometry, caches: Sequence[Tensor], rows_per_decode: int, workspace: int
) -> set[Geometry]:
    """What kernels depend on; more than one where K caches have pages at several strides."""
    common = Geometry(
        heads=geometry.heads,
        max_context=geometry.max_context,
        max_decode_rows=min(geometry.max_rows, geometry.max_requests * rows_per_decode),
        max_prefill_rows=geometry.max_rows,
        head_dim=geometry.head_dim,
        page=geometry.page_size,
        k=geometry.top_k,
        next_n=(rows_per_decode,),
        workspace=workspace,
        notes_nan=True,
    )
    return {replace(common, page_stride=cache.stride(0)) for cache in caches}
