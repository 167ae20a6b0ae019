"""The hand-over where contexts take turns on one GPU: streams sleep, and no kernel polls.

A kernel that polls would burn its whole time slice while the service waits for its turn.
"""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from weakref import finalize

import torch

from attention_worker.device_handoff import DeviceHandoff
from indexer_client.attachment import Attachment
from indexer_client.inputs import StepInputs
from ipc_handoff.flag_words import FlagLayout
from ipc_handoff.kernels.flag import raise_flag
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.regions import HostMemory
from ipc_handoff.stream_words import MappedFlags, wait_at_least, write_word

_ANY_ANSWER = 1
_LOOK_ONCE = 0.0


class TimesliceHandoff(DeviceHandoff):
    """As `DeviceHandoff`; a wait is ended from outside, by a process that writes its word.

    Args:
        memory: of the worker.
        wait_bound: seconds without progress of the service after which a wait ends.

    Attributes:
        flags: the block that the service must have, too; one for the worker's life.
    """

    def __init__(self, memory: WorkerMemory, wait_bound: float) -> None:
        super().__init__(memory, _LOOK_ONCE)
        layers = len(memory.geometry.layers)
        self.flags = HostMemory.create(FlagLayout(layers).size, "flags")
        self._mapped = MappedFlags(self.flags, layers, memory.device.index or 0)
        # Graphs that are replayed after the end still write there, and wait for nobody.
        finalize(self, self._mapped.close).atexit = False
        self._seconds = wait_bound
        self._peer, self._process_peer = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        super().start()
        flags, peer = self.flags.fileno(), self._process_peer.fileno()
        layers = len(self._memory.geometry.layers)
        arguments = map(str, (flags, peer, layers, self._seconds))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "attention_worker.watchdog_process", *arguments],
            pass_fds=(flags, peer),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._process_peer.close()

    def close(self) -> None:
        super().close()
        self._peer.close()  # which ends the process
        self._process_peer.close()
        if self._process is not None:
            self._process.wait()

    def why_over(self, attachment: Attachment) -> str | None:
        if self._process is not None and self._process.poll() is not None:
            return "the process that ends waits is dead"
        return super().why_over(attachment)

    def exchanged(self, before: Attachment | None, after: Attachment | None) -> None:
        super().exchanged(before, after)
        process = after.watch.fileno() if after is not None else None
        with suppress(OSError):  # it is dead: `why_over` says so
            socket.send_fds(self._peer, [b"."], [] if process is None else [process])

    def publish(self, attachment: Attachment, step: int, inputs: StepInputs) -> None:
        super().publish(attachment, step, inputs)
        write_word(self._stream(), self._mapped.address + self._mapped.layout.published, step)

    def _ask(self, ordinal: int) -> None:
        layout, address = self._mapped.layout, self._mapped.address
        request, answer = address + layout.request(ordinal), address + layout.answer(ordinal)
        raise_flag(self._memory, request, answer)

    def _sleep(self, ordinal: int) -> None:
        answer = self._mapped.address + self._mapped.layout.answer(ordinal)
        wait_at_least(self._stream(), answer, _ANY_ANSWER)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._memory.device).cuda_stream
