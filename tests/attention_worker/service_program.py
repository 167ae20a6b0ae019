"""A service on a GPU, to be ended by tests:

    python -m tests.attention_worker.service_program SOCKET DEVICE PAUSES [SETTING=VALUE ...]

It comes up as far as it can without an address, and begins to serve when a line comes on its
standard input: a successor is there at once. It does not tune (tuned kernels select the same bits,
and tuning takes longer than the tests), pauses where the words behind the descriptor PAUSES say so,
and at SIGUSR1 accesses memory that is not there.
"""

import logging
import signal
import sys
import threading
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from indexer_service import device_executor, server
from indexer_service.engines import triton as engine
from indexer_service.kernels import warm_up
from indexer_service.settings import Settings
from tests.attention_worker.pauses import pausing

_LOADED = (device_executor, engine)
"""Modules that a service imports late: here before it begins to serve."""
_NOWHERE = 8


@triton.jit
def _store(address: tl.int64):
    tl.store(tl.cast(address, tl.pointer_type(tl.int64)), 1)


def _access_illegally(device: torch.device) -> None:
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        _store[(1,)](_NOWHERE)


def main(socket: str, device: str, pauses: str, *settings: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    where = torch.device(device)
    torch.zeros(1, device=where)
    torch.cuda.synchronize(where)
    signal.signal(
        signal.SIGUSR1,
        lambda *_: threading.Thread(target=_access_illegally, args=(where,)).start(),
    )
    if not sys.stdin.readline():
        return
    values: dict[str, Any] = dict(setting.split("=", 1) for setting in settings)
    no_tuning = patch.object(warm_up, "tuned_operations", lambda geometry, device: iter(()))
    with no_tuning, pausing(int(pauses), where):
        server.run(Settings(address=f"unix:{socket}", device=device, **values))


if __name__ == "__main__":
    main(*sys.argv[1:])
