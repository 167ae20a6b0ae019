"""One session's runner: built once everything that a step needs is there, gone with its bank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.attachment import Attachment, HostViews
from indexer_service.engine import Engine
from indexer_service.errors import ServiceError, precondition
from indexer_service.events import StepObserver
from indexer_service.executors import executor_of
from indexer_service.plan_queue import OnReport
from indexer_service.runner import RunnerSettings, StepRunner
from indexer_service.session_regions import SessionRegions
from ipc_handoff.descriptors import WAKE_SERVICE_TOKEN, WAKE_WORKER_TOKEN, Inbox
from ipc_handoff.detectors import NO_DETECTION, Detection
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.wakeups import Wakeup
from ipc_handoff.wire import placement_name

_WAKEUP_TOKENS = (WAKE_SERVICE_TOKEN, WAKE_WORKER_TOKEN)
# The first session of a geometry compiles and tunes its kernels.
_READY_SECONDS = 600.0


@dataclass(frozen=True)
class StepResources:
    """What the runners of all sessions share.

    Attributes:
        detection: the detectors that are on, and whom they tell.
        on_device_lost: called from a runner's thread when the GPU's context is gone.
    """

    engine: Engine
    settings: RunnerSettings
    observer: StepObserver | None
    detection: Detection = NO_DETECTION
    on_device_lost: Callable[[], None] | None = None


@dataclass(frozen=True)
class StepCounts:
    """A runner's counters."""

    queued: int = 0
    last_step: int = 0
    answered: int = 0
    cancelled: int = 0
    faulted_rows: int = 0
    lost_reports: int = 0
    lost_stamps: int = 0

    @classmethod
    def of(cls, runner: StepRunner) -> "StepCounts":
        return cls(
            runner.queued_steps,
            runner.last_step,
            runner.answered_steps,
            runner.cancelled_steps,
            runner.faulted_rows,
            runner.lost_reports,
            runner.lost_stamps,
        )


class SessionSteps:
    """Not thread-safe: its session keeps calls apart, `counts` excepted.

    An attachment happens once a session: its ring and doorbells count from the beginning, so a
    bank that was used and given back cannot be taken up again.
    """

    def __init__(
        self,
        resources: StepResources,
        regions: SessionRegions,
        geometry: HandoffGeometry,
        epoch: int,
        inbox: Inbox | None,
        *,
        use_ring: bool,
        placement: pb.Placement = pb.PLACEMENT_UNSPECIFIED,
    ) -> None:
        self._resources = resources
        self._regions = regions
        self._geometry = geometry
        self._epoch = epoch
        self._inbox = inbox
        self._use_ring = use_ring
        self._placement = placement
        self._wakeups: dict[int, Wakeup] = {}
        self._runner: StepRunner | None = None
        self._is_over = False
        self._last_counts = StepCounts()

    @property
    def counts(self) -> StepCounts:
        runner = self._runner
        return self._last_counts if runner is None else StepCounts.of(runner)

    def collect_wakeups(self) -> None:
        """Take the eventfds that have arrived.

        Raises:
            RegionError: a descriptor sent as eventfd is none.
        """
        if self._inbox is None:
            return
        for token in _WAKEUP_TOKENS:
            if token not in self._wakeups:
                descriptor = self._inbox.take(token)
                if descriptor is not None:
                    self._wakeups[token] = Wakeup(descriptor)

    def start_if_complete(self) -> None:
        """Start, if nothing is missing any more. Raises as `collect_wakeups`."""
        self.collect_wakeups()
        if (
            self._runner is not None
            or self._is_over
            or self._regions.missing
            or len(self._wakeups) < len(_WAKEUP_TOKENS)
        ):
            return
        attachment = self._attachment()
        make_executor = executor_of(
            attachment,
            self._resources.engine,
            self._resources.settings.gate_bound_seconds,
            self._resources.detection,
            stamped=self._resources.observer is not None,
        )
        self._runner = StepRunner(
            attachment,
            make_executor,
            self._resources.settings,
            use_ring=self._use_ring,
            observer=self._resources.observer,
            on_device_lost=self._resources.on_device_lost,
        )
        self._runner.start()

    def wait_until_ready(self) -> None:
        """Return once the first step would be answered without delay. Blocks, within a bound."""
        if (runner := self._runner) is not None:
            runner.wait_until_ready(_READY_SECONDS)

    def submit(self, plan: pb.StepPlan, on_report: OnReport) -> None:
        """Queue a plan; `on_report` is called once, from the runner's thread.

        Raises:
            ServiceError: FAILED_PRECONDITION while something is missing, RESOURCE_EXHAUSTED with
                too many plans waiting.
        """
        # Looked at once, and first: a thread that ends the attachment takes it away at any time.
        runner = self._runner
        if self._is_over:
            raise _over("plan")
        if runner is None:
            raise self._incomplete()
        runner.submit(plan, on_report)

    def check_can_register(self, regions: Sequence[pb.Region]) -> None:
        """Raise FAILED_PRECONDITION for a bank's region after the attachment is over."""
        if not self._is_over:
            return
        for region in regions:
            if region.name in self._regions.bank_names:
                raise _over(region.name)

    def unregister(self, names: Sequence[str]) -> None:
        """Give regions back when no step reads them. Blocks.

        Raises:
            ServiceError: NOT_FOUND; then nothing happened.
        """
        self._regions.check_registered(names)
        if self._runner is not None and not set(names) & set(self._regions.bank_names):
            with self._runner.quiesced():
                self._regions.unregister(names)
            return
        # The runner's views are the bank: it must be gone, and have said so in `drained`.
        self._end_runner(finish=False)
        self._regions.unregister(names)

    def hurry(self) -> None:
        """Cancel what a close with `finish` still runs. Blocks; from any thread."""
        if (runner := self._runner) is not None:
            runner.close()

    def close(self, *, finish: bool) -> int:
        """Drain; returns how many steps that cancelled. Blocks.

        Args:
            finish: run the steps whose plans have arrived, instead of cancelling them.
        """
        try:
            return self._end_runner(finish=finish)
        finally:
            for wakeup in self._wakeups.values():
                wakeup.close()

    def _attachment(self) -> Attachment:
        regions = self._regions
        return Attachment(
            epoch=self._epoch,
            geometry=self._geometry,
            control=regions.control(),
            bank=regions.device_views() or HostViews(regions.staging(), regions.answers()),
            k_cache=regions.k_cache,
            wake_service=self._wakeups[WAKE_SERVICE_TOKEN],
            wake_worker=self._wakeups[WAKE_WORKER_TOKEN],
            flags=regions.flags(),
            engine=self._resources.engine.configuration.engine,
            placement=placement_name(self._placement),
        )

    def _end_runner(self, *, finish: bool) -> int:
        if (runner := self._runner) is None:
            return 0
        self._is_over = True
        cancelled = runner.close(finish=finish)
        self._last_counts = StepCounts.of(runner)
        # It holds views of the bank, and they hold the mapping.
        self._runner = None
        return cancelled

    def _incomplete(self) -> ServiceError:
        missing = [repr(name) for name in self._regions.missing]
        if missing:
            return precondition(
                "regions", f"{', '.join(missing)} not registered", "RegisterRegions first"
            )
        return precondition(
            "wakeups",
            f"no eventfds arrived under {WAKE_SERVICE_TOKEN} and {WAKE_WORKER_TOKEN}",
            "send both over the descriptor socket",
        )


def _over(field: str) -> ServiceError:
    return precondition(field, "this session's bank was given back after use", "open a new session")
