"""torch's streams and events, whose constructors say nothing of their types."""

import torch


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream beside the one that runs steps."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def new_event() -> torch.cuda.Event:
    """An event that tells no times; nothing is recorded yet."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
