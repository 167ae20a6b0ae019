"""Memory of one side that its hand-over kernels keep between launches: what stands where.

None of it is shared with the other process.
"""

from enum import IntEnum


class WorkerState(IntEnum):
    """int64 words of the worker, written by its stream alone. They fill one L2 line."""

    ARMED = 0
    """The step that was published and not begun: the next forward takes it, once."""
    CURRENT = 1
    """The step of the running forward; 0: it works inline."""
    ROWS = 2
    """Rows of the step."""
    STAGING = 3
    """Address of the bank's staging."""
    ANSWERS = 4
    """Address of the bank's answers."""
    STAGING_SLOT = 5
    """Address of the step's slot in staging."""
    ANSWER_SLOT = 6
    """Address of the step's slot in answers."""
    STAMPS = 7
    """Address of the step's stamps."""
    ATTACHMENT = 8
    """Number of the attachment that the step was published for, from 1."""
    LOST = 9
    """The newest attachment that a wait gave up: nothing is published for it any more."""
    ANSWERED = 10
    """Layers that the service answered so far."""
    INLINE = 11
    """Layers of published steps that it did not."""
    SELECTED = 12
    """The newest step that the host had begun when a layer's selection was last decided."""


class Decision(IntEnum):
    """int32 words, 0 or 1, that say to all later kernels of a layer who computes it."""

    DETACHED = 0
    """Written by the first layer's staging, and by a wait that ends without an answer; staging of
    the layers behind only confirms it. 1: no step is under way, the layer is computed inline.
    """
    ANSWERED = 1
    """Written by the wait, as those below. 1: the answer is handed back."""
    RESCUED = 2
    """1: the wait ended without an answer, the layer is computed inline now."""
    INLINE = 3
    """1: one of the two is so, and the answer is not handed back."""


class WaitEnd(IntEnum):
    """How a wait ended."""

    ANSWERED = 1
    CANCELLED = 2
    """The service gave up the step: the rest of it is computed inline."""
    STALLED = 3
    """No progress within the bound: the attachment is over."""
    ABORTED = 4
    """The host said that the attachment is over."""
    STALE = 5
    """What was rung for is not in the slot: the rest of the step is computed inline."""
    OVERWRITTEN = 6
    """It was, and was not any more when it had been handed back; as STALE."""


class Told(IntEnum):
    """int64 words in pinned host memory: what the worker's kernels tell their host."""

    LOST = 0
    """As WorkerState.LOST, written after the others."""
    STEP = 1
    LAYER = 2
    """Ordinal of the layer whose wait ended the attachment."""
    END = 3
    """A WaitEnd."""
    CANCELLED = 4
    """Steps that the service gave up."""


class Live(IntEnum):
    """int32 words of the service, written by its stream alone."""

    LIVE = 0
    """1: the step is wanted. 0: nothing of it is scored, written or rung any more."""
    REASON = 1
    """A GateEnd, when it is not."""
    SEEN = 2
    """64 bits: the generation that was found, where that is the reason."""
    SEEN_HIGH = 3
    ANSWERED = 4
    """Layers of the step that were answered."""


class GateEnd(IntEnum):
    """How a gate ended."""

    PASSED = 1
    LATE = 2
    """The worker did not come within the bound."""
    NEWER = 3
    """The worker has published a newer step."""
    DETACHED = 4
    CLOSING = 5
    RACED_INPUTS = 6
    """The slot of the step's lengths and tables holds another step's."""
    RACED_LAYER = 7
    """The slot of the layer's q and weights holds another layer's."""


class Gate(IntEnum):
    """What a gate waits for."""

    PUBLISHED = 0
    """The step's lengths and tables; it is the step's first gate."""
    FIRST_LAYER = 1
    """As LAYER; what was copied after PUBLISHED is that step's, or the step is given up."""
    LAYER = 2
