"""Measures a layer's hand-over between two processes, with the kernels that steps use.

`dsa-indexer doctor` starts both sides: `python -m dsa_indexer_cli.handoff_probe SIDE FD WORKER
SERVICE [FLAGS]`, with the ends of one socket and the ordinals of the GPUs. The worker prints the
result. One row a layer; its first words plus one are the answer, in place of a selection, so that
what is measured is the hand-over alone. Both sides replay CUDA graphs, as they do for decode steps;
with the descriptor of a flag block both streams sleep, and the service launches kernel by kernel.
"""

import json
import socket
import statistics
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsa_indexer_cli.children import PEER_GONE
from dsa_indexer_cli.doctor_handoff import PROBED_LAYERS
from indexer_service.step_flags import POLLING, Polling, Sleeping
from ipc_handoff.banks import ANSWERS, STAGING
from ipc_handoff.cuda_regions import CudaExport, CudaMemory
from ipc_handoff.device_banks import DeviceBank
from ipc_handoff.kernels.done import done
from ipc_handoff.kernels.flag import raise_flag
from ipc_handoff.kernels.gate import gate
from ipc_handoff.kernels.publish import publish
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.stage import stage
from ipc_handoff.kernels.wait import wait
from ipc_handoff.kernels.words import Gate, WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import HostMemory, TensorSpec
from ipc_handoff.stream_words import MappedFlags, wait_at_least, write_word

GEOMETRY = HandoffGeometry(
    layers=tuple(range(PROBED_LAYERS)),
    heads=64,
    head_dim=128,
    top_k=64,
    page_size=64,
    max_rows=1,
    max_requests=1,
    max_context=4096,
    slots=2,
)
_LAYERS = len(GEOMETRY.layers)
_Q_WORDS = GEOMETRY.heads * GEOMETRY.head_dim // 4

_STEPS, _UNTIMED = 15, 3
_ATTACHMENT = 1

_WAIT_BOUND, _GATE_BOUND = 200_000_000, 1_000_000_000  # ns
_AHEAD_SECONDS = 0.003
"""So long before it is published the service has a step: its gates wait, as in an engine."""


class PeerGone(Exception):
    """The other side, or doctor, has closed the socket."""


class Peer:
    """The other side: a JSON object a line, each way."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lines = self._socket.makefile("rw", encoding="utf-8")

    def say(self, **message: Any) -> None:
        try:
            print(json.dumps(message), file=self._lines, flush=True)
        except OSError as error:
            raise PeerGone from error

    def hear(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except OSError as error:
            raise PeerGone from error
        if not line:
            raise PeerGone
        message: dict[str, Any] = json.loads(line)
        return message


def _stream_on(ordinal: int) -> torch.cuda.Stream:
    torch.cuda.set_device(ordinal)
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.set_stream(stream)
    return stream


def _captured(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Run once, so that every kernel is there, and captured."""
    body()
    stream = torch.cuda.current_stream()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    return graph


def _answer(q_words: Tensor, out: Tensor) -> None:
    """What stands for a selection. q_words: int32 [1, _Q_WORDS]; out: int32 [1, top_k]."""
    torch.add(q_words[:, : GEOMETRY.top_k], 1, out=out)


# The service.


def serve(
    peer: Peer, worker_gpu: int, service_gpu: int, block: HostMemory | None
) -> dict[str, Any]:
    """Answer steps until the worker leaves."""
    stream = _stream_on(service_gpu)
    device = torch.device("cuda", service_gpu)
    flags = POLLING
    if block is not None:
        flags = Sleeping(block, _LAYERS, device, _GATE_BOUND / 1e9, lambda: False)
    offer = peer.hear()
    opened = {
        name: CudaMemory.open(
            _export(offer[name]), owner=offer["owner"], device=service_gpu, field_name=name
        )
        for name in (STAGING, ANSWERS)
    }
    memory = ServiceMemory(
        GEOMETRY,
        device,
        opened[STAGING].pointer,
        opened[ANSWERS].pointer,
    )
    numbers = torch.arange(_STEPS + 1, dtype=torch.int64, pin_memory=True)
    # What runs before capturing is step 0, which a new bank says is published and staged.
    steps = [
        partial(_answer_step, memory, flags, slot, _slot_views(opened, slot))
        for slot in range(GEOMETRY.slots)
    ]
    if flags.can_capture:
        steps = [partial(graph.replay) for graph in map(_captured, steps)]
    else:
        steps[0]()
    stream.synchronize()
    peer.say(ready=True)
    try:
        while True:
            step = peer.hear()["step"]
            memory.step.copy_(numbers[step : step + 1], non_blocking=True)
            flags.begin(step, range(_LAYERS))
            steps[step % GEOMETRY.slots]()
    except PeerGone:
        memory.closing.fill_(1)
        flags.wake()
        stream.synchronize()
    return {}


def _slot_views(opened: dict[str, CudaMemory], slot: int) -> tuple[Tensor, Tensor]:
    """q of a slot as int32 [1, _Q_WORDS], and its answers, int32 [1, top_k]."""
    layout = GEOMETRY.device
    q = TensorSpec((1, _Q_WORDS), torch.int32)
    answers = TensorSpec((1, GEOMETRY.top_k), torch.int32)
    at, answers_at = layout.staging_at(slot) + layout.q, layout.answers_at(slot)
    return (
        opened[STAGING].tensor(at, q.byte_size, q, "q"),
        opened[ANSWERS].tensor(answers_at, answers.byte_size, answers, "answers"),
    )


def _answer_step(
    memory: ServiceMemory, flags: Polling, slot: int, views: tuple[Tensor, Tensor]
) -> None:
    bound = flags.gate_bound(_GATE_BOUND)
    flags.sleep(Gate.PUBLISHED)
    gate(memory, Gate.PUBLISHED, slot=slot, bound=bound)
    for ordinal in range(_LAYERS):
        kind = Gate.LAYER if ordinal else Gate.FIRST_LAYER
        flags.sleep(kind, ordinal)
        gate(memory, kind, slot=slot, ordinal=ordinal, bound=bound)
        _answer(*views)
        done(memory, ordinal, slot)
        flags.answered(memory, ordinal)


# The worker.


class _Flags:
    """The worker's side of a flag block, which does nothing where kernels poll."""

    def __init__(self, block: HostMemory | None, memory: WorkerMemory) -> None:
        self._memory = memory
        device = memory.device.index
        self._mapped = None if block is None else MappedFlags(block, _LAYERS, device)
        self.wait_bound = _WAIT_BOUND if block is None else 0

    def published(self, step: int) -> None:
        if self._mapped is not None:
            word = self._mapped.address + self._mapped.layout.published
            write_word(torch.cuda.current_stream().cuda_stream, word, step)

    def sleep(self, ordinal: int) -> None:
        if self._mapped is not None:
            layout, address = self._mapped.layout, self._mapped.address
            answer = address + layout.answer(ordinal)
            raise_flag(self._memory, address + layout.request(ordinal), answer)
            wait_at_least(torch.cuda.current_stream().cuda_stream, answer, 1)


def work(peer: Peer, worker_gpu: int, service_gpu: int, block: HostMemory | None) -> dict[str, Any]:
    """Time steps with the service, and their work alone."""
    stream = _stream_on(worker_gpu)
    device = torch.device("cuda", worker_gpu)
    bank = DeviceBank(GEOMETRY, 0, staging_device=service_gpu, answers_device=worker_gpu)
    peer.say(
        owner=str(uuid.uuid4()),
        **{name: _offer(bank, name) for name in (STAGING, ANSWERS)},
    )
    memory = WorkerMemory(GEOMETRY, device)
    flags = _Flags(block, memory)
    shape = (_LAYERS, 1, GEOMETRY.heads * GEOMETRY.head_dim)
    inputs = torch.randint(0, 256, (_STEPS, *shape), dtype=torch.uint8, device=device)
    q = inputs[0].clone()
    weights = torch.ones(_LAYERS, 1, GEOMETRY.heads, device=device)
    answers = torch.zeros(_LAYERS, 1, GEOMETRY.top_k, dtype=torch.int32, device=device)
    expected = torch.zeros_like(answers)
    query_start = torch.arange(2, dtype=torch.int32, device=device)
    seq_lens = torch.full((1,), GEOMETRY.max_context, dtype=torch.int32, device=device)
    table = torch.zeros(1, GEOMETRY.table_width, dtype=torch.int32, device=device)

    def publish_for(attachment: int, step: int, staging: int, answers: int) -> None:
        publish(
            memory, query_start, seq_lens, table, step=step, attachment=attachment,
            staging=staging, answers=answers, rows=1, max_length=GEOMETRY.max_context,
        )  # fmt: skip

    def with_service() -> None:
        for ordinal in range(_LAYERS):
            stage(memory, q[ordinal], weights[ordinal], ordinal=ordinal, first=ordinal == 0)
            flags.sleep(ordinal)
            wait(memory, ordinal=ordinal, bound=flags.wait_bound, out=answers[ordinal])

    def alone() -> None:
        for ordinal in range(_LAYERS):
            _answer(q[ordinal].view(torch.int32), expected[ordinal])

    publish_for(0, 0, 0, 0)  # An attachment that none is: nothing is written.
    remote_graph, alone_graph = _captured(with_service), _captured(alone)
    torch.equal(answers, expected)  # Loads its kernels.
    peer.hear()
    remote, inline = [], []
    for step in range(1, _STEPS + 1):
        q.copy_(inputs[step - 1])
        answers.zero_()
        stream.synchronize()
        peer.say(step=step)
        time.sleep(_AHEAD_SECONDS)
        publish_for(_ATTACHMENT, step, bank.staging_address, bank.answers_address)
        flags.published(step)
        remote.append(_microseconds(remote_graph))
        inline.append(_microseconds(alone_graph))
        answered = int(memory.state[WorkerState.ANSWERED])
        if answered != step * _LAYERS:
            raise RuntimeError(f"{answered} of {step * _LAYERS} layers were answered in time")
        if not torch.equal(answers, expected):
            raise RuntimeError(f"step {step}: other answers came than the service gave")
    return _result(remote[_UNTIMED:], inline[_UNTIMED:])


def _microseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (_new_event() for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000


def _new_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def _result(remote: list[float], inline: list[float]) -> dict[str, Any]:
    """Microseconds a layer; `remote` and `inline` are those of steps."""
    alone = statistics.median(inline)
    return {
        "microseconds_a_layer": round((statistics.median(remote) - alone) / _LAYERS, 2),
        "worst_microseconds_a_layer": round((max(remote) - alone) / _LAYERS, 2),
        "layers": _LAYERS,
        "steps": len(remote),
    }


# What is said between them.


def _offer(bank: DeviceBank, name: str) -> dict[str, Any]:
    memory = bank.memories[name]
    assert isinstance(memory, CudaMemory)
    return asdict(memory.export) | {"handle": memory.export.handle.hex()}


def _export(offer: dict[str, Any]) -> CudaExport:
    return CudaExport(**(offer | {"handle": bytes.fromhex(offer["handle"])}))


def main(
    side: str, descriptor: str, worker_gpu: str, service_gpu: str, flags: str | None = None
) -> int:
    peer = Peer(int(descriptor))
    try:
        act = {"worker": work, "service": serve}[side]
        block = None if flags is None else HostMemory.open(int(flags), writable=True)
        result = act(peer, int(worker_gpu), int(service_gpu), block)
    except PeerGone:
        print(json.dumps({"error": PEER_GONE}))
        return 1
    except Exception as error:  # Whatever it is, doctor shows it as a line.
        traceback.print_exc()
        print(json.dumps({"error": f"{side}: {_one_line(error)}"}))
        return 1
    print(json.dumps(result))
    return 0


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
