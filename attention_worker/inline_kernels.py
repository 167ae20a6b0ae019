"""The indexer inside the worker, enqueued with every layer: it computes what is not answered.

Of a decode layer its kernels stand before the wait, where they cost nothing, and a small one for
a lost answer stands behind it; of other layers all stands behind (see `InlineLayer`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_worker.answer_or_rescue import answer_or_rescue
from attention_worker.plan_numbers import PlanNumbers
from attention_worker.step_shape import StepShape
from indexer_client.inputs import StepInputs
from indexer_service.kernels.architecture import processors, sized_for
from indexer_service.kernels.device_inputs import DeviceInputs, copy_checked
from indexer_service.kernels.indexer.rescue import RescueInputs, rescue, rescue_bytes
from indexer_service.kernels.indexer.windows import DEFAULT_WORKSPACE
from indexer_service.kernels.row_places import Told
from indexer_service.kernels.step import enqueue_step
from ipc_handoff.kernels.found import Found, tell_found
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.layout import HandoffGeometry

_NONE = -1
_SHADOW = 4
"""Of the programs that a layer is computed by where nobody else works: one part in so many."""


@dataclass(frozen=True)
class Looks:
    """What the copy of a step's inputs looks at besides what it must.

    Attributes:
        found: where it is told. faults: requests that are not trusted. rows: positions and slots.
    """

    found: Found
    faults: bool
    rows: bool

    def of(self, inputs: StepInputs, step: Tensor) -> Told:
        return Told(
            tell_found,
            (self.found.count, self.found.entries),
            step,
            inputs.positions if self.rows else None,
            inputs.slots if self.rows else None,
            self.faults,
        )


class InlineKernels:
    """The same code as the service's, on the worker's own checked copy of a step's inputs.

    Made before the first capture: graphs hold the addresses of the copy.

    Args:
        geometry: of the session.
        k_caches: by layer, uint8 [pages, page, D+4] on `device`.
        device: of the worker.
        workspace: bytes for temporaries (default: 256 MiB).

    Attributes:
        begun: int64 [1] on the device, the newest step whose inputs were taken.
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
        self._is_cuda = device.type == "cuda"
        # A step's table serves all layers: what the shortest cache holds is in all of them.
        self._pages = min(len(k_cache) for k_cache in k_caches.values())
        self._inputs = DeviceInputs(geometry.max_requests, geometry.table_width, device)
        self._numbers = PlanNumbers(geometry.max_requests, device)
        self.begun = self._numbers.step
        self._row_ends = torch.zeros(geometry.max_rows, dtype=torch.int32, device=device)

    def take(self, inputs: StepInputs, step: int, looks: "Looks | None" = None) -> None:
        """Enqueue the checked copy of a step's lengths and table; never waits.

        All requests that any graph could look at are written: those behind the step's get
        length 0, so that a padded batch selects nothing for them.

        Args:
            looks: what is looked at besides, and told; None: nothing.
        """
        self._numbers.send(inputs, step)
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
            told=None if looks is None else looks.of(inputs, self.begun),
        )

    def select(
        self,
        layer: int,
        q: Tensor,
        weights: Tensor,
        shape: StepShape,
        out: Tensor,
        enabled: Tensor | None = None,
        *,
        settled: bool = False,
    ) -> None:
        """Enqueue one layer's selection; can be captured if `shape` is of decodes only.

        Args:
            q: e4m3 [T, H, D], weights: fp32 [T, H]; T may be more than the shape's rows.
            out: int32 [T, top_k]; rows behind the shape's get -1.
            enabled: int32 [1] on the device; with 0 in it nothing is computed.
            settled: as for `indexer.select_paged`.
        """
        rows, requests = shape.rows, shape.requests
        enqueue_step(
            q[:rows],
            weights[:rows],
            self._k_caches[layer],
            self._inputs.seq_lens[:requests],
            self._table(shape),
            self._geometry.top_k,
            decode_requests=shape.decode_requests,
            rows_per_decode=shape.rows_per_decode,
            offsets=shape.offsets,
            length_bounds=shape.length_bounds,
            row_ends=None if shape.is_decode else self._row_ends[:rows],
            out=out[:rows],
            enabled=enabled,
            settled=settled,
            workspace=self._workspace,
        )
        if len(q) > rows:
            # Nobody asked for them, so that neither answer nor selection is lost.
            out[rows : len(q)].fill_(_NONE)

    def layer(
        self, layer: int, q: Tensor, weights: Tensor, shape: StepShape, out: Tensor
    ) -> "InlineLayer":
        """One layer as the hand-over enqueues it; arguments as for `select`."""
        return InlineLayer(self, layer, q, weights, shape, out)

    def can_rescue(self, shape: StepShape) -> bool:
        """Whether the small form fits a forward."""
        longest = self._columns(shape) * self._geometry.page_size
        room = DEFAULT_WORKSPACE if self._workspace is None else self._workspace
        return self._is_cuda and shape.is_decode and rescue_bytes(shape.rows, longest) <= room

    def to_rescue(
        self, layer: int, q: Tensor, weights: Tensor, shape: StepShape, out: Tensor, enabled: Tensor
    ) -> RescueInputs:
        """What `rescue` takes for decodes: it selects as `select`, the same bits from one small
        launch, slow if it is enabled.
        """
        rows, requests = shape.rows, shape.requests
        return RescueInputs(
            q=q[:rows].view(requests, shape.rows_per_decode, *q.shape[1:]),
            k_cache=self._k_caches[layer],
            weights=weights[:rows],
            seq_lens=self._inputs.seq_lens[:requests],
            block_table=self._table(shape),
            k=self._geometry.top_k,
            out=out[:rows],
            enabled=enabled,
        )

    def _columns(self, shape: StepShape) -> int:
        return min(self._geometry.columns(shape.max_length), self._geometry.table_width)

    def _table(self, shape: StepShape) -> Tensor:
        return self._inputs.block_table[: shape.requests, : self._columns(shape)]


@dataclass(frozen=True)
class InlineLayer:
    """A layer of a forward, with kernels before its wait and behind it.

    Before the wait they cost nothing: they return while the service works. Behind it stands one
    small launch for decodes, which are captured and short; other steps run eagerly and are long,
    and there the same kernels stand, for both cases.

    After the first layer they are *settled*: they go by what the last layer's wait has decided,
    and begin beside this layer's staging.
    """

    kernels: InlineKernels
    number: int
    q: Tensor
    weights: Tensor
    shape: StepShape
    out: Tensor

    def before_the_wait(self, detached: Tensor, *, first: bool) -> None:
        if self.kernels.can_rescue(self.shape):
            # The service begins meanwhile: fewer programs are sooner out of its way.
            with sized_for(max(1, processors(self.q.device) // _SHADOW)):
                self._select(detached, settled=not first)

    def behind_the_wait(self, rescued: Tensor, inline: Tensor) -> None:
        if self.kernels.can_rescue(self.shape):
            rescue(self._to_rescue(rescued))
        else:
            self._select(inline)

    def answer_or_rescue(self, memory: WorkerMemory, ordinal: int) -> bool:
        # A program a request leaves rows behind the requests' alone.
        if not self.kernels.can_rescue(self.shape) or len(self.out) > self.shape.rows:
            return False
        answer_or_rescue(memory, self._to_rescue(memory.rescued), ordinal=ordinal)
        return True

    def _to_rescue(self, enabled: Tensor) -> RescueInputs:
        return self.kernels.to_rescue(
            self.number, self.q, self.weights, self.shape, self.out, enabled
        )

    def _select(self, enabled: Tensor, *, settled: bool = False) -> None:
        self.kernels.select(
            self.number, self.q, self.weights, self.shape, self.out, enabled, settled=settled
        )
