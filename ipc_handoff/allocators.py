"""Which of torch's allocators give memory that another process can open."""

import os

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def allocator_to_change() -> tuple[str, str] | None:
    """The variable under which torch's memory would have no CUDA IPC handle, and what to set it
    to; None if it has one."""
    for variable in _VARIABLES:
        options = [part.strip() for part in os.environ.get(variable, "").split(",")]
        others = [part for part in options if not part.startswith(("expandable_", "backend:"))]
        if "expandable_segments:True" in options or "backend:cudaMallocAsync" in options:
            return variable, ",".join(filter(None, [*others, "expandable_segments:False"]))
    return None
