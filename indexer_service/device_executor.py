"""Steps on a GPU: enqueued at once, gated on the device, and reported when they are done.

No Python runs between two layers. A decode step is one copy in, one graph, one copy out and one
event; other steps are the same kernels, launched one by one.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.attachment import Attachment
from indexer_service.device_step import DeviceStep, StageTimes, is_timed
from indexer_service.device_stream import DeviceStream, Mark, told_when_lost
from indexer_service.engine import Engine
from indexer_service.engines.triton import TritonEngine
from indexer_service.executor import BegunStep, DeviceLost, StepCancelled
from indexer_service.kernels.device_inputs import FAULT_WORDS, pack_numbers
from indexer_service.launch_budget import LaunchBudget
from indexer_service.plans import check_plan
from indexer_service.preparation import Preparation
from indexer_service.session_regions import DeviceViews
from indexer_service.step_findings import ServiceFindings
from indexer_service.step_flags import POLLING, flags_of
from indexer_service.step_graphs import GraphKey, StepGraphs, first_shapes, key_of, shape_of
from indexer_service.step_inputs import k_caches_of, offsets_of
from indexer_service.step_kernels import STEP_WORDS, LaunchShape, StepKernels
from indexer_service.step_slots import StepSlot, StepSlots
from ipc_handoff.detectors import NO_DETECTION, Detection
from ipc_handoff.kernels.clock import ClockOffset, clock_offset

_SPIN_SECONDS = 0.001
_LAUNCHES_A_STEP = 5
_NANOSECONDS = 1_000_000_000


class DeviceExecutor:
    """See `Executor`. Steps are launched in the runner's thread; kernels and graphs
    for them are made in `Preparation`'s.

    Args:
        gate_bound_seconds: longest wait for one word.
        detection: the detectors that are on, and whom they tell.
        stamped: somebody asks for the times of stages.
        sleep: is not used: what waits, waits on the device.
        is_closing: the service wants steps to end.
        make_stream: a test's own stream.
    """

    def __init__(
        self,
        attachment: Attachment,
        bank: DeviceViews,
        engine: Engine,
        gate_bound_seconds: float,
        stamped: bool,
        sleep: Callable[[float], None],
        is_closing: Callable[[], bool],
        *,
        detection: Detection = NO_DETECTION,
        make_stream: Callable[[torch.device], DeviceStream] = DeviceStream,
    ) -> None:
        self._at = attachment
        self._bank = bank
        assert isinstance(engine, TritonEngine)
        self._engine = engine
        self._gate_bound = gate_bound_seconds
        self._findings = ServiceFindings(detection, attachment.geometry.layers)
        self._stamped = stamped
        self._is_closing = is_closing
        self._make_stream = make_stream
        self._ordinals = {layer: i for i, layer in enumerate(attachment.geometry.layers)}
        self._stream: DeviceStream | None = None
        self._capturing: DeviceStream | None = None
        self._clocking: DeviceStream | None = None
        self._budget: LaunchBudget | None = None
        self._flags = POLLING
        self._kernels: StepKernels | None = None
        self._slots: StepSlots | None = None
        self._stages: StageTimes | None = None
        self._graphs = StepGraphs(attachment.geometry)
        self._caches: list[Tensor] | None = None
        self._tokens = 0
        self._preparation = Preparation()
        self._prepared: set[int] = set()
        self._launched = 0
        self._is_lost = False
        self.last_step = 0
        self.most_in_flight = attachment.geometry.slots
        self.spin_seconds = _SPIN_SECONDS

    # Before the first step, and while there is none.

    def prepare(self) -> None:
        """
        Raises:
            StepCancelled: the session is closing.
            DeviceLost: the GPU is.
        """
        geometry, device = self._at.geometry, self._engine.device
        self._stream, self._capturing = self._make_stream(device), self._make_stream(device)
        self._flags = flags_of(self._at, device, self._gate_bound, self._is_closing)
        self._budget = LaunchBudget(self._mark)
        with self._stream.current():
            self._kernels = StepKernels(
                geometry, device, self._bank.staging_address, self._bank.answers_address,
                int(self._gate_bound * _NANOSECONDS), self._engine.workspace, self._flags,
                checks_generations=self._findings.checks_generations,
                counts_nan=self._findings.counts_nan,
            )  # fmt: skip
            plan, result = self._kernels.plan, self._kernels.result
            cells = len(self._kernels.stamps_of(0))
            self._slots = StepSlots(
                [
                    StepSlot(
                        self._stream.pinned(len(plan), torch.int32),
                        self._stream.pinned(len(result), torch.int32),
                        self._stream.pinned(cells, torch.int64),
                        len(geometry.layers),
                    )
                    for _ in range(self.most_in_flight)
                ]
            )
            if self._stamped:
                self._clocking = self._make_stream(device)
                look = partial(_clock_of, self._clocking)
                self._stages = StageTimes(look, len(self._ordinals))
            # What was zeroed above is what the first step must find.
            self._stream.synchronize()
        if self._find_caches():
            self._make(1, self._is_closing)

    def prepare_more(self) -> bool:
        self._preparation.raise_if_lost()
        if self._caches is not None or not self._find_caches():
            return False
        self._preparation.want(1, self._make)
        return True

    def _find_caches(self) -> bool:
        """Whether all K caches are registered."""
        found = [self._at.k_cache(layer) for layer in self._at.geometry.layers]
        caches = [cache for cache in found if cache is not None]
        if len(caches) < len(found):
            return False
        self._caches = caches
        self._tokens = min(len(cache) for cache in caches) * self._at.geometry.page_size
        return True

    def _make(self, rows_per_decode: int, is_stopped: Callable[[], bool]) -> None:
        """Kernels and graphs for decode requests of so many rows: after the first time, beside
        the steps that run.
        """
        kernels, caches, capturing = self._kernels, self._caches, self._capturing
        assert kernels is not None
        assert caches is not None
        assert capturing is not None
        geometry = self._at.geometry
        self._engine.prepare(geometry, caches, rows_per_decode, is_stopped)
        with capturing.current():
            if not self._prepared and not self.last_step:
                # Compiles the rest. All words are 0, and so is the step: no gate waits. Nobody
                # looks at answers of no step.
                for shape in first_shapes(geometry):
                    kernels.launch(shape, caches[:1])
                kernels.make_give_up()
                capturing.synchronize()
            self._prepared.add(rows_per_decode)

            def capture(key: GraphKey) -> Callable[[], None]:
                shape = shape_of(key, geometry)
                return capturing.capture(lambda: kernels.launch(shape, caches))

            self._graphs.make_all(rows_per_decode, capture, is_stopped)
            if not self._flags.can_capture:
                self._graphs.forget()  # they wait for no step; every kernel is made with them

    # Steps.

    def begin(self, plan: pb.StepPlan, report: pb.StepReport) -> BegunStep:
        geometry = self._at.geometry
        check_plan(plan, geometry, self._at.epoch, self.last_step)
        offsets = offsets_of(plan)
        caches = self._caches_of(plan)
        self.last_step = plan.step
        self._check_prepared(plan)
        assert self._slots is not None
        slot = self._slots.take()
        try:
            mark = self._launch(plan, offsets, caches, slot)
        except BaseException:
            self._after_failure(plan.step, slot)
            raise
        return DeviceStep(
            plan, report, offsets, self._ordinals, slot, self._slots, mark, self._stages,
            self._gate_bound, self._engine.device, self._findings,
        )  # fmt: skip

    def _check_prepared(self, plan: pb.StepPlan) -> None:
        """Kernels that are not there are made aside, and steps do not wait for it; but where K
        caches are still missing, with the first step that does not need them.
        """
        rows = plan.rows_per_decode or 1
        if rows in self._prepared or self._caches is None:
            return
        why = self._preparation.want(rows, self._make)
        state = "are being made" if why is None else f"could not be made: {why}"
        raise StepCancelled(f"kernels for rows_per_decode {rows} {state}")

    def _launch(
        self, plan: pb.StepPlan, offsets: Sequence[int], caches: Sequence[Tensor], slot: StepSlot
    ) -> Mark:
        stream, kernels, budget = self._on_stream(), self._kernels, self._budget
        assert kernels is not None
        assert budget is not None
        slot.plan[:STEP_WORDS].view(torch.int64)[0] = plan.step
        pack_numbers(
            slot.plan[kernels.numbers], rows=plan.rows, requests=plan.requests,
            decode_requests=plan.decode_requests, rows_per_decode=plan.rows_per_decode,
            max_length=plan.max_length, exact_lengths=plan.exact.seq_lens or None,
            exact_offsets=plan.exact.query_start or None,
        )  # fmt: skip
        key = key_of(plan, self._at.geometry)
        graph = None if key is None else self._graphs.find(key)
        with stream.current():
            self._launched = plan.step
            self._flags.begin(plan.step, [self._ordinals[layer] for layer in plan.layers])
            kernels.plan.copy_(slot.plan, non_blocking=True)
            if graph is not None:
                graph()
            else:
                kernels.launch(self._shape(plan, offsets), caches, budget.spend)
            budget.spend(_LAUNCHES_A_STEP)
            words = len(slot.result) - FAULT_WORDS * (
                self._at.geometry.max_requests - plan.requests
            )
            slot.result[:words].copy_(kernels.result[:words], non_blocking=True)
            if self._stages is not None and is_timed(plan):
                slot.stamps.copy_(kernels.stamps_of(plan.step), non_blocking=True)
            return self._mark()

    def _mark(self) -> Mark:
        return self._flags.watched(self._on_stream().mark())

    def _after_failure(self, step: int, slot: StepSlot) -> None:
        """Of a launch: what was launched ends by its gates; the rest is given up."""
        self._flags.wake()
        try:
            with self._on_stream().current():
                assert self._kernels is not None
                self._kernels.give_up(step)
                self._on_stream().synchronize()
        except DeviceLost:
            self._is_lost = True
            raise
        finally:
            assert self._slots is not None
            self._slots.give_back(slot)

    def _shape(self, plan: pb.StepPlan, offsets: Sequence[int]) -> LaunchShape:
        geometry = self._at.geometry
        exact = list(plan.exact.seq_lens)
        return LaunchShape(
            slot=geometry.staging.slot_of(plan.step),
            decode_requests=plan.decode_requests,
            rows_per_decode=plan.rows_per_decode,
            offsets=offsets,
            length_bounds=exact or [plan.max_length] * plan.requests,
            columns=geometry.columns(plan.max_length),
            ordinals=[self._ordinals[layer] for layer in plan.layers],
        )

    def _caches_of(self, plan: pb.StepPlan) -> list[Tensor]:
        fits = max(plan.exact.seq_lens, default=0) <= self._tokens
        if self._caches is not None and fits and tuple(plan.layers) == self._at.geometry.layers:
            return self._caches
        found = k_caches_of(plan, self._at.k_cache)
        return [found[layer] for layer in plan.layers]

    def _on_stream(self) -> DeviceStream:
        assert self._stream is not None
        return self._stream

    # Afterwards.

    @property
    def lost_stamps(self) -> int:
        return 0 if self._stages is None else self._stages.lost

    def give_up(self, step: int) -> None:
        # What was launched is given up by its gates. The word holds one step: told again, an
        # older one would hide a newer one.
        if step <= self._launched or self._kernels is None or self._is_lost:
            return
        try:
            with self._on_stream().current():
                self._kernels.give_up(step)
        except DeviceLost:
            self._is_lost = True

    def interrupt(self) -> None:
        if (kernels := self._kernels) is not None:
            kernels.closing[0] = 1
            self._flags.wake()

    def regions_changed(self) -> None:
        self._preparation.stop()
        self._caches = None
        self._prepared.clear()
        self._graphs.forget()

    def drain(self) -> None:
        self.interrupt()
        if self._stream is not None:
            with told_when_lost(self._engine.device):
                self._stream.synchronize()

    def close(self) -> None:
        stream = self._stream
        streams = [made for made in (stream, self._capturing, self._clocking) if made is not None]
        try:
            if stream is not None and not self._is_lost:
                with told_when_lost(self._engine.device):
                    stream.synchronize()  # a step that was given up at the very end
        except DeviceLost:
            self._is_lost = True
            raise
        finally:
            self.regions_changed()
            self._stream, self._capturing, self._clocking = None, None, None
            self._kernels, self._slots, self._budget = None, None, None
            flags, self._flags = self._flags, POLLING
        if not self._is_lost:
            for made in streams:
                made.close()
            flags.close()


def _clock_of(stream: DeviceStream) -> ClockOffset:
    """Looked at on a stream of its own: it waits for no step, and nothing is captured there."""
    with stream.current():
        return clock_offset(stream.device)
