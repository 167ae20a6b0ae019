"""The indexer inside the worker, enqueued behind every wait: it computes what was not answered."""

from collections.abc import Mapping

import torch
from torch import Tensor

from attention_worker.plan_numbers import PlanNumbers
from attention_worker.step_shape import StepShape
from indexer_client.inputs import StepInputs
from indexer_service.kernels.device_inputs import DeviceInputs, copy_checked, faults_of
from indexer_service.kernels.step import RowFault, enqueue_step
from ipc_handoff.layout import HandoffGeometry

_NONE = -1


class InlineKernels:
    """The same code as the service's, on the worker's own checked copy of a step's inputs.

    Made before the first capture: graphs hold the addresses of the copy.

    Args:
        geometry: of the session.
        k_caches: by layer, uint8 [pages, page, D+4] on `device`.
        device: of the worker.
        workspace: bytes for temporaries (default: 256 MiB).
    """

    def __init__(
        self,
        geometry: HandoffGeometry,
        k_caches: Mapping[int, Tensor],
        device: torch.device,
        *,
        workspace: int | None = None,
    ) -> None:
        self._geometry = geometry
        self._k_caches = dict(k_caches)
        self._workspace = workspace
        # A step's table serves all layers: what the shortest cache holds is in all of them.
        self._pages = min(len(k_cache) for k_cache in k_caches.values())
        self._inputs = DeviceInputs(geometry.max_requests, geometry.table_width, device)
        self._numbers = PlanNumbers(geometry.max_requests, device)
        self._row_ends = torch.zeros(geometry.max_rows, dtype=torch.int32, device=device)

    def take(self, inputs: StepInputs) -> None:
        """Enqueue the checked copy of a step's lengths and table; never waits.

        All requests that any graph could look at are written: those behind the step's get
        length 0, so that a padded batch selects nothing for them.
        """
        self._numbers.send(inputs)
        copy_checked(
            self._inputs,
            self._numbers.device_numbers,
            inputs.query_start,
            inputs.seq_lens,
            inputs.block_table,
            bucket=self._geometry.max_requests,
            pages=self._pages,
            page_size=self._geometry.page_size,
            row_ends=self._row_ends,
        )

    def select(
        self,
        layer: int,
        q: Tensor,
        weights: Tensor,
        shape: StepShape,
        out: Tensor,
        enabled: Tensor | None = None,
    ) -> None:
        """Enqueue one layer's selection; can be captured if `shape` is of decodes only.

        Args:
            q: e4m3 [T, H, D], weights: fp32 [T, H]; T may be more than the shape's rows.
            out: int32 [T, top_k]; rows behind the shape's get -1.
            enabled: int32 [1] on the device; with 0 in it nothing is computed.
        """
        rows, requests = shape.rows, shape.requests
        columns = -(-shape.max_length // self._geometry.page_size)
        enqueue_step(
            q[:rows],
            weights[:rows],
            self._k_caches[layer],
            self._inputs.seq_lens[:requests],
            self._inputs.block_table[:requests, :columns],
            self._geometry.top_k,
            decode_requests=shape.decode_requests,
            rows_per_decode=shape.rows_per_decode,
            offsets=shape.offsets,
            length_bounds=shape.length_bounds,
            row_ends=None if shape.is_decode else self._row_ends[:rows],
            out=out[:rows],
            enabled=enabled,
            workspace=self._workspace,
        )
        if len(q) > rows:
            out[rows : len(q)].fill_(_NONE)

    def faults(self, requests: int) -> list[RowFault]:
        """What was wrong with the newest step's inputs. Waits for the device: for people."""
        return faults_of(self._inputs.faults[:requests].tolist())
