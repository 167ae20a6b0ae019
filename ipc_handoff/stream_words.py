"""Stream memory operations on the words of `flag_words`: a stream sleeps, and nothing polls."""

import ctypes

from ipc_handoff import cuda_runtime as cuda
from ipc_handoff.cuda_runtime import call
from ipc_handoff.flag_words import FlagLayout
from ipc_handoff.regions import HostMemory

_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ, of the difference: numbers may be up to 2^63 apart."""
_REGISTER_PORTABLE, _REGISTER_MAPPED = 1, 2

_TERMS = {"field": "stream", "fix": "a driver with 64-bit stream memory operations"}


class MappedFlags:
    """A flag block that a GPU's streams and kernels can use.

    Args:
        memory: at least `FlagLayout(layers).size` bytes; must live as long as this object.
        device: ordinal of the GPU.

    Attributes:
        address: of the block's first byte, as the GPU sees it.

    Raises:
        RegionError: the driver cannot map it.
    """

    def __init__(self, memory: HostMemory, layers: int, device: int) -> None:
        self.layout = FlagLayout(layers)
        self._device = device
        # Held: what is registered must not be unmapped.
        self._bytes = (ctypes.c_char * self.layout.size).from_buffer(memory.view())
        self._pointer = ctypes.addressof(self._bytes)
        terms = {"field": "flags", "problem": "cannot be mapped", "fix": "a GPU that maps memory"}
        with cuda.on_device(device):
            call(
                "cuMemHostRegister",
                self._pointer,
                self.layout.size,
                _REGISTER_PORTABLE | _REGISTER_MAPPED,
                **terms,
            )
            self.address = int(call("cuMemHostGetDevicePointer", self._pointer, 0, **terms))

    def close(self) -> None:
        """No stream may use the block any more. A second time does nothing."""
        if self._pointer:
            with cuda.on_device(self._device):
                call(
                    "cuMemHostUnregister",
                    self._pointer,
                    field="flags",
                    problem="are not unmapped",
                    fix="see the error's name",
                )
            self._pointer = 0


def wait_at_least(stream: int, address: int, value: int) -> None:
    """Let a stream sleep until a word is at least `value`; can be captured.

    Args:
        stream: handle of the stream (`torch.cuda.Stream.cuda_stream`).
    """
    call(
        "cuStreamWaitValue64",
        stream,
        address,
        value,
        _AT_LEAST,
        problem="cannot wait for a word",
        **_TERMS,
    )


def write_word(stream: int, address: int, value: int) -> None:
    """Let a stream write a word behind everything before; can be captured."""
    call(
        "cuStreamWriteValue64",
        stream,
        address,
        value,
        0,
        problem="cannot write a word",
        **_TERMS,
    )
