"""One worker of the hand-over's benchmark: prints what it measured as one JSON line.

    python benchmarks/handoff_gpu_worker.py PLACEMENT ADDRESS SERVICE_DEVICE [WHAT ...]

A process of its own: MPS must be there before its first use of the GPU. WHAT: decode (of all
shapes, or decode:8x65536:...), chunk, or beside (steps of one size, for as long as another worker
does the same).
"""

import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import torch
from handoff_workload import CHUNK, DIFFERENT, GEOMETRY, LAYERS, TOP_K, Decode, Work, chunk_inputs

from attention_worker.device_session import DeviceIndexer
from attention_worker.placements import Placement
from indexer_client import ClientSettings
from ipc_handoff.banks import ANSWERS
from ipc_handoff.device_layout import DEVICE_STAMPED_STEPS
from ipc_handoff.regions import TensorSpec
from ipc_handoff.stages import SERVICE_STAGES, WorkerStage

SHAPES = ((1, 4096), (8, 4096), (64, 4096), (1, 65536), (8, 65536), (64, 65536))
ROUNDS = 12
STEADY, FILLING = 16, 4
"""Steps that are enqueued one after the other; the first ones find an idle GPU, or a host that is
not ahead yet.
"""
AHEAD_SECONDS = 0.004
BESIDE_SECONDS = 2.0
READY_SECONDS = 240.0


def indexer(work: Work, placement: str, address: str, service_device: int) -> DeviceIndexer:
    settings = ClientSettings(address=address, placement=placement, rpc_timeout_seconds=60.0)
    return DeviceIndexer(
        GEOMETRY, work.k_caches, device=work.device, settings=settings,
        service_device=service_device,
    )  # fmt: skip


class Measure:
    """The same work inline and remote, in turns."""

    def __init__(self, placement: str, address: str, service_device: int) -> None:
        self.work = Work.make(torch.device("cuda", 0))
        self.inline = indexer(self.work, "inline", address, 0)
        self.remote = indexer(self.work, placement, address, service_device)
        self.number = 0

    def attach(self) -> None:
        if self.remote.placement is Placement.PEER_GPU:
            for layer in GEOMETRY.layers[:DIFFERENT]:
                self.remote._shared[layer].tensor.copy_(self.work.k_caches[layer])
            for layer in GEOMETRY.layers[DIFFERENT:]:
                own = self.remote._shared[layer % DIFFERENT].tensor
                if (tensor := self.remote._shared[layer].tensor).data_ptr() != own.data_ptr():
                    tensor.copy_(own)
        self.remote.start()
        self.remote.wait_attached(READY_SECONDS)
        # Only now: what the service has tuned is found on disk.
        self.inline.warm_up()

    def change(self, rows: int) -> None:
        self.number += 1
        self.work.change(self.number, rows)

    def step(self, decode: Decode, ahead: bool) -> float:
        decode.begin()
        if ahead:
            torch.cuda.synchronize()
            time.sleep(AHEAD_SECONDS)
        return decode.replay()

    def decode(self, requests: int, context: int) -> dict[str, Any]:
        found: dict[str, Any] = {"requests": requests, "context": context}
        for attention in (False, True):
            ways = {
                "inline": Decode(self.work, self.inline, requests, context, attention),
                "remote": Decode(self.work, self.remote, requests, context, attention),
            }
            times: dict[str, list[float]] = {"inline": [], "remote": [], "not ahead": []}
            layers: list[float] = []
            waiting: list[float] = []
            first: list[float] = []
            equal = True
            between = {name: self.between(way) for name, way in ways.items()}
            late = [_first_layer(stamps) for stamps in self.newest_stamps()]
            before = self.remote.statistics.answered_layers
            for turn in range(ROUNDS + 2):
                self.change(requests)
                taken = {"inline": self.step(ways["inline"], True)}
                for name in ("not ahead", "remote"):
                    ways["remote"].out.fill_(-7)
                    taken[name] = self.step(ways["remote"], name == "remote")
                    equal = equal and bool(torch.equal(ways["inline"].out, ways["remote"].out))
                if turn < 2:
                    continue
                for name, time_taken in taken.items():
                    times[name].append(time_taken)
                for stamps in self.newest_stamps(1):
                    first.append(_first_layer(stamps))
                    if not attention:
                        layers += _layers(stamps)
                        waiting += _waiting(stamps)
            answered = self.remote.statistics.answered_layers - before
            middle = {name: median(taken) for name, taken in times.items()}
            added = [(taken - middle["inline"]) / LAYERS for taken in times["remote"]]
            result = {
                "equal": equal,
                "answered": answered == 2 * (ROUNDS + 2) * LAYERS,
                "inline_us": middle["inline"],
                "remote_us": middle["remote"],
                "ratio": middle["remote"] / middle["inline"],
                "added_us_a_layer": median(added),
                "added_us_a_layer_most": max(added),
                "not_ahead_us": middle["not ahead"] - middle["remote"],
                "between_us": between,
                "not_hidden_us": between["remote"] - between["inline"],
            }
            if first and late:  # otherwise there is no service
                result["first_layer_us"] = {
                    "ahead": median(first), "step after step": median(late),
                }  # fmt: skip
                result["not_hidden_us"] += median(late) - median(first)
            if layers:
                inline_layer = middle["inline"] / LAYERS
                result["added_us_a_layer_p99"] = quantiles(layers, n=100)[98] - inline_layer
                result["added_us_a_layer_p50_of_layers"] = median(layers) - inline_layer
                result["waiting_share"] = sum(waiting) / (sum(layers) or 1)
            found["with attention" if attention else "selection"] = result
            if (requests, context) == (8, 65536) and not attention:
                found["timeline"] = self.timeline()
        print(json.dumps(found), file=sys.stderr, flush=True)
        return found

    def between(self, decode: Decode) -> float:
        """µs from one forward's end to the next one's begin, while the host enqueues steps one
        after the other without waiting.
        """
        marks = []
        for _ in range(STEADY):
            decode.begin()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            decode.graph.replay()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        gaps = [before[1].elapsed_time(after[0]) * 1e3 for before, after in pairwise(marks)]
        return median(gaps[FILLING:])

    def newest_stamps(self, steps: int = STEADY - FILLING) -> list[Any]:
        """Of the last remote steps, without those whose stamps are lost."""
        last = self.remote._steps
        found = [self.remote.stamps(step) for step in range(last - steps + 1, last + 1)]
        return [stamps for stamps in found if stamps is not None]

    def timeline(self) -> dict[str, Any]:
        """Both sides' stamps of the last step, ns of the GPU's clock: layers [stages]."""
        attachment = self.remote._attachment
        step = self.remote._steps
        worker = self.remote.stamps(step)
        if attachment is None or worker is None:
            return {}
        layout = GEOMETRY.device
        spec = TensorSpec((1 + LAYERS * len(SERVICE_STAGES),), torch.int64)
        at = layout.stamps + step % DEVICE_STAMPED_STEPS * layout.stamp_stride
        block = attachment.bank.memories[ANSWERS].tensor(at, spec.byte_size, spec, "stamps").cpu()
        service = block[1:].view(LAYERS, len(SERVICE_STAGES)).tolist()
        return {"worker": [list(row) for row in worker], "service": service}

    def chunk(self) -> dict[str, Any]:
        """A prefill chunk, layer after layer, enqueued eagerly by both."""
        inputs = chunk_inputs(self.work)
        out = torch.full((2, CHUNK, TOP_K), -7, dtype=torch.int32, device=self.work.device)
        times: dict[str, list[float]] = {"inline": [], "remote": []}
        equal = True
        for turn in range(4):
            for row, (name, one) in enumerate((("inline", self.inline), ("remote", self.remote))):
                one.begin_step(inputs)
                torch.cuda.synchronize()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for layer in GEOMETRY.layers:
                    own = layer % DIFFERENT
                    one.select(layer, self.work.q[own], self.work.weights[own], out[row])
                end.record()
                end.synchronize()
                if turn:
                    times[name].append(begin.elapsed_time(end) * 1e3 / LAYERS)
            equal = equal and bool(torch.equal(out[0], out[1]))
        middle = {name: median(taken) for name, taken in times.items()}
        return {
            "rows": CHUNK, "context": inputs.max_length, "equal": equal,
            "inline_us_a_layer": middle["inline"], "remote_us_a_layer": middle["remote"],
            "ratio": middle["remote"] / middle["inline"],
        }  # fmt: skip

    def beside(self) -> dict[str, Any]:
        """Decode steps one after the other, as a second worker's run beside them."""
        decode = Decode(self.work, self.remote, 8, 65536, False)
        until = time.monotonic() + BESIDE_SECONDS
        taken = []
        while time.monotonic() < until:
            self.change(8)
            taken.append(self.step(decode, False))
        return {"steps": len(taken), "median_us": median(taken), "most_us": max(taken)}


def _layers(stamps: Any) -> list[float]:
    """µs from each layer's staging to the next one's."""
    begun = [row[WorkerStage.STAGE_BEGUN] for row in stamps]
    return [(after - before) / 1e3 for before, after in pairwise(begun)]


def _first_layer(stamps: Any) -> float:
    """µs from the first layer's staging to the second one's: long, where the service comes late."""
    return (stamps[1][WorkerStage.STAGE_BEGUN] - stamps[0][WorkerStage.STAGE_BEGUN]) / 1e3


def _waiting(stamps: Any) -> list[float]:
    """µs from each layer's bell to the end of its wait."""
    return [
        (row[WorkerStage.WAIT_ENDED] - row[WorkerStage.REQUEST_RUNG]) / 1e3 for row in stamps[:-1]
    ]


def shapes(what: str) -> Sequence[tuple[int, int]]:
    """Requests and contexts that `decode...` names."""
    chosen = []
    for text in what.split(":")[1:]:
        requests, context = map(int, text.split("x"))
        chosen.append((requests, context))
    return chosen or SHAPES


def main(placement: str, address: str, service_device: str, *what: str) -> None:
    measure = Measure(placement, address, int(service_device))
    told: dict[str, Any] = {
        "placement": str(measure.remote.placement), "why": measure.remote.placement_reason,
    }  # fmt: skip
    torch.cuda.set_stream(torch.cuda.Stream())
    try:
        if placement != "inline":
            measure.attach()
            told["reasons"] = list(measure.remote.reasons)
        for name in what:
            if name.startswith("decode"):
                told["decode"] = [measure.decode(*shape) for shape in shapes(name)]
        if "chunk" in what:
            told["chunk"] = measure.chunk()
        if "beside" in what:
            told["beside"] = measure.beside()
        told["statistics"] = str(measure.remote.statistics)
        told["last_error"] = str(measure.remote.last_error)
    finally:
        measure.remote.close()
        measure.inline.close()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
