"""The doorbell words of one attachment: who writes which, and in which order.

| word | writer | meaning | order |
|---|---|---|---|
| `published` | worker | step whose lengths and tables are staged | after those stores |
| `requests[layer]` | worker | step whose q and weights of this layer are staged | after those |
| `detached` | worker | 1: this attachment is over, for good | before anything inline |
| `progress` | service | counts finished windows of work | after each window |
| `dones[layer]` | service | step whose answer of this layer is written | after the answer |
| `cancelled` | service | newest step given up; it is not touched any more | last access before |
| `exported[step]` | service | step whose spans have left it | any time |
| `worker_kept[step]` | worker | step whose trace the worker wants kept | any time |
| `service_kept[step]` | service | step whose trace the service wants kept | any time |
| `drained` | service | 1: nothing of this attachment is touched any more | the last store |

A gate or wait compares a word with the step for equality; the step itself comes by value
(in the plan), never from the other side's memory. Words start at 0, which is no step.
`cancelled` holds one step: waits go in the order of steps, so an older one is never asked for.
Words of traces stand at `step % STAMPED_STEPS` and hold the step, so an older one is told from it.
"""

import threading

from ipc_handoff.layout import CACHE_LINE, ControlLayout
from ipc_handoff.words import Words


class StepMarks:
    """Which of the newest steps are marked: a word each, of one writer.

    Args:
        area: shared bytes.
    """

    def __init__(self, area: memoryview) -> None:
        self._words = Words(area)

    def mark(self, step: int) -> None:
        self._words.store(step, step % len(self._words))

    def has(self, step: int) -> bool:
        return self._words.load(step % len(self._words)) == step


class _Bells:
    def __init__(self, control: memoryview, layout: ControlLayout) -> None:
        words = {
            name: Words(layout.areas[name].of(control), CACHE_LINE)
            for name in (
                "published",
                "requests",
                "detached",
                "progress",
                "dones",
                "cancelled",
                "drained",
            )
        }
        self._published = words["published"]
        self._requests = words["requests"]
        self._detached = words["detached"]
        self._progress = words["progress"]
        self._dones = words["dones"]
        self._cancelled = words["cancelled"]
        self._drained = words["drained"]
        self._exported, self._worker_kept, self._service_kept = (
            StepMarks(layout.areas[name].of(control))
            for name in ("exported", "worker_kept", "service_kept")
        )


class WorkerBells(_Bells):
    """The worker's side. Layers are ordinals in the geometry's list."""

    def publish(self, step: int) -> None:
        self._published.store(step)

    def request(self, layer: int, step: int) -> None:
        self._requests.store(step, layer)

    def detach(self) -> None:
        self._detached.store(1)

    def is_done(self, layer: int, step: int) -> bool:
        return self._dones.load(layer) == step

    def is_cancelled(self, step: int) -> bool:
        return self._cancelled.load() == step

    def progress(self) -> int:
        return self._progress.load()

    def is_drained(self) -> bool:
        return self._drained.load() == 1

    def is_exported(self, step: int) -> bool:
        return self._exported.has(step)

    def keep(self, step: int) -> None:
        """Also the service's part of the step's trace, if it still has it."""
        self._worker_kept.mark(step)

    def is_kept(self, step: int) -> bool:
        """The service wants the step's trace."""
        return self._service_kept.has(step)


class ServiceBells(_Bells):
    """The service's side. One thread calls all but what concerns traces: any thread may."""

    def __init__(self, control: memoryview, layout: ControlLayout) -> None:
        super().__init__(control, layout)
        self._windows = 0
        self._is_over = False
        self._last_store = threading.Lock()

    def published(self) -> int:
        return self._published.load()

    def requested(self, layer: int) -> int:
        return self._requests.load(layer)

    def is_detached(self) -> bool:
        return self._detached.load() != 0

    def advance(self) -> None:
        self._windows += 1
        self._progress.store(self._windows)

    def done(self, layer: int, step: int) -> None:
        self._dones.store(step, layer)

    def cancel(self, step: int) -> None:
        self._cancelled.store(step)

    def exported(self, step: int) -> None:
        """Does nothing once `drained` was called: the worker may use the bank again."""
        with self._last_store:
            if not self._is_over:
                self._exported.mark(step)

    def keep(self, step: int) -> None:
        """Also the worker's part of the step's trace, if it still has it. As `exported`."""
        with self._last_store:
            if not self._is_over:
                self._service_kept.mark(step)

    def is_kept(self, step: int) -> bool:
        """The worker wants the step's trace."""
        return self._worker_kept.has(step)

    def drained(self) -> None:
        with self._last_store:
            self._is_over = True
            self._drained.store(1)
