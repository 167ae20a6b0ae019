"""What the GPU tests' peer processes do: `python -m tests.ipc_handoff.cuda_children NAME ...`."""

import json
import sys
from dataclasses import asdict

import torch

from ipc_handoff.cuda_regions import CudaExport, CudaMemory
from ipc_handoff.errors import RegionError
from ipc_handoff.regions import SharedTensor, TensorSpec

SIZE = 1 << 20
# Of the exported part in its tensor, and the part's bytes.
OFFSET, PART = 123_456, 300_000


def written(export: CudaExport) -> str:
    """An export as a line of text."""
    return json.dumps(asdict(export) | {"handle": export.handle.hex()})


def read(line: str) -> CudaExport:
    """The export that `written` wrote."""
    fields = json.loads(line)
    return CudaExport(**(fields | {"handle": bytes.fromhex(fields["handle"])}))


def pattern(count: int, seed: int) -> torch.Tensor:
    """uint8 [count], other values for another seed."""
    return ((torch.arange(count) * 7 + seed * 31) % 251).to(torch.uint8)


def whole(memory: CudaMemory) -> torch.Tensor:
    """All bytes of a memory, uint8."""
    spec = TensorSpec((memory.byte_size,), torch.uint8)
    return memory.tensor(0, memory.byte_size, spec, "whole")


def _say(line: object) -> None:
    print(line, flush=True)


def own() -> None:
    """A worker that does one thing a line, and answers each with a line.

    part SEED: export a part of a torch tensor filled by the seed. another SEED: export a second
    part of the same torch tensor. allocate SEED: memory of its own. free: give all up.
    get I / set I V: of the newest export. where: its address.
    """
    base = torch.empty(0)
    kept: list[CudaMemory | SharedTensor] = []
    newest = torch.empty(0)
    for line in sys.stdin:
        verb, *numbers = line.split()
        values = [int(number) for number in numbers]
        match verb:
            case "part":
                base = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
                newest = base[OFFSET : OFFSET + PART]
                newest.copy_(pattern(PART, *values))
                shared = SharedTensor.of_cuda(newest)
                kept.append(shared)
                assert isinstance(shared.memory, CudaMemory)
                answer = written(shared.memory.export)
            case "another":
                newest = base[:OFFSET]
                newest.copy_(pattern(OFFSET, *values))
                memory = CudaMemory.of_tensor(newest, "another")
                kept.append(memory)
                answer = written(memory.export)
            case "allocate":
                memory = CudaMemory.allocate(SIZE, 0, "own")
                kept.append(memory)
                newest = whole(memory)
                assert not newest.any()
                newest.copy_(pattern(SIZE, *values))
                answer = written(memory.export)
            case "free":
                base = newest = torch.empty(0)
                memory = shared = None  # type: ignore[assignment]
                kept.clear()
                torch.cuda.empty_cache()
                answer = "freed"
            case "get":
                answer = str(int(newest[values[0]]))
            case "where":
                answer = str(newest.data_ptr())
            case "set":
                newest[values[0]] = values[1]
                answer = "set"
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        _say(answer)


def refuse() -> None:
    """Say why a torch tensor cannot be exported, then whether CUDA still works."""
    tensor = torch.arange(1000, device="cuda", dtype=torch.int32)
    try:
        SharedTensor.of_cuda(tensor, "k_cache/3")
        _say("exported")
    except RegionError as error:
        _say(error)
    _say(int((tensor + 1).sum()))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
