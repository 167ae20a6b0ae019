"""What can go wrong between the two sides, apart from one of them being absent."""


class HandoffError(Exception):
    """Base of all errors of this package."""


class LayoutMismatch(HandoffError):
    """The two sides would read each other's words at different places."""


class RegionError(HandoffError):
    """Memory that cannot be shared, or does not hold what its description says.

    The message reads `field: what is wrong (fix: what to do)`.
    """


class RegionUnavailable(RegionError):
    """Memory described rightly that cannot be shared or opened as things are now."""


class RingFull(HandoffError):
    """The consumer does not keep up; the producer must detach, never wait."""


class RingLapped(HandoffError):
    """Messages were overwritten before they were read; the consumer must detach."""


class DescriptorRefused(HandoffError):
    """The service did not take a descriptor, or does not know the session's nonce."""
