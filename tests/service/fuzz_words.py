"""Random contents of the memory that a worker shares with its service."""

import random
import struct
import time
from collections import Counter
from contextlib import suppress

import grpc
import torch
from google.protobuf.message import DecodeError

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.banks import CONTROL, STAGING
from ipc_handoff.descriptors import WAKE_SERVICE_TOKEN
from ipc_handoff.errors import RingFull, RingLapped
from tests.service.mutations import EDGES, mutate
from tests.service.support import LocalService, Worker
from tests.service.tally import tally

_WORD = struct.Struct("<Q")
_MOST_WRITES = 8
_STEPS_OF_A_SESSION = 60
_REPORT_SECONDS = 0.02
_PAUSE_SECONDS = 0.0003


def scribble(memory: memoryview, chance: random.Random) -> None:
    """Overwrite a few words or bytes anywhere, with edges or anything."""
    for _ in range(1 + chance.randrange(_MOST_WRITES)):
        if chance.randrange(4):
            at = chance.randrange(len(memory) // _WORD.size) * _WORD.size
            value = chance.choice([*EDGES, chance.getrandbits(64), chance.randrange(1, 200)])
            _WORD.pack_into(memory, at, value)
        else:
            at = chance.randrange(len(memory))
            some = chance.randbytes(min(1 + chance.randrange(64), len(memory) - at))
            memory[at : at + len(some)] = some


class SharedWords:
    """A session whose worker writes nonsense. Made anew when it has ended, or is worn."""

    def __init__(self, service: LocalService) -> None:
        self._service = service
        self._stub = service.stub()
        self._worker = self._new_worker()
        self._sent = 0
        self._counts: Counter[str] = Counter()

    def send(self, chance: random.Random) -> None:
        self._sent += 1
        if self._sent % _STEPS_OF_A_SESSION == 0:
            self._renew()
        kind = chance.choice((self._words, self._plan, self._plan, self._inputs, self._inputs))
        try:
            kind(chance)
            self._take_reports(wait=kind != self._words)
        except (RingFull, RingLapped, DecodeError):
            # The service has given this worker up, or what it reports is scribbled over.
            self._renew()

    def _words(self, chance: random.Random) -> None:
        memory = self._worker.bank.memories[chance.choice((CONTROL, CONTROL, STAGING))]
        scribble(memory.view(), chance)
        self._ring()

    def _plan(self, chance: random.Random) -> None:
        """A plan that the ring's checksum vouches for, mostly of a step that is wholly staged."""
        plan = self._some_plan(chance)
        is_staged = chance.randrange(4) > 0  # else its gates end by themselves
        if is_staged:
            self._worker.stage(plan)
        for _ in range(1 + chance.randrange(4)):
            mutate(plan, chance)
        if is_staged:
            bells = self._worker.bank.control.bells
            bells.publish(plan.step)
            for ordinal in range(len(self._worker.geometry.layers)):
                bells.request(ordinal, plan.step)
        data = bytearray(plan.SerializeToString())
        if chance.randrange(4) == 0:
            data = bytearray(chance.randbytes(chance.randrange(120)))
        ring = self._worker.bank.control.plans
        ring.post(bytes(data[: ring.payload_bytes]))
        self._ring()

    def _inputs(self, chance: random.Random) -> None:
        """A right plan; what is staged for it is not what it promises."""
        worker = self._worker
        plan = self._some_plan(chance)
        worker.stage(plan)
        slot = worker.bank.staging[worker.geometry.staging.slot_of(plan.step)]
        for tensor in (slot.query_start, slot.seq_lens, slot.block_table):
            flat = tensor.view(-1)
            for _ in range(chance.randrange(4)):
                flat[chance.randrange(len(flat))] = _int32(chance)
        if chance.randrange(3) == 0:
            noise = chance.randbytes(slot.q.numel())
            slot.q.view(torch.uint8).view(-1).copy_(
                torch.frombuffer(bytearray(noise), dtype=torch.uint8)
            )
        worker.bank.control.plans.post(plan.SerializeToString())
        self._ring()

    def _some_plan(self, chance: random.Random) -> pb.StepPlan:
        geometry = self._worker.geometry
        requests = chance.randrange(1, geometry.max_requests + 1)
        decodes = chance.randrange(requests + 1)
        rows = decodes + (requests - decodes) * chance.randrange(1, 3)
        return self._worker.plan(
            rows=min(rows, geometry.max_rows),
            requests=requests,
            decode_requests=decodes,
            layers=geometry.layers[: chance.randrange(1, len(geometry.layers) + 1)],
            max_length=chance.randrange(1, geometry.max_context + 1),
        )

    def _ring(self) -> None:
        self._worker.wakeups[WAKE_SERVICE_TOKEN].ring()

    def _take_reports(self, *, wait: bool) -> None:
        """Count what the service reports; so it has taken one input before the next comes."""
        deadline = time.monotonic() + (_REPORT_SECONDS if wait else 0.0)
        reports = self._worker.bank.control.reports
        while True:
            while (data := reports.take()) is not None:
                report = pb.StepReport.FromString(data)
                self._counts[pb.StepStatus.Name(report.status).removeprefix("STEP_STATUS_")] += 1
                self._counts["rows not trusted"] += report.fault_count
                assert report.status != pb.STEP_STATUS_FAILED, report.message
                wait = False
            if not wait or time.monotonic() > deadline:
                return
            time.sleep(_PAUSE_SECONDS)

    def _new_worker(self) -> Worker:
        return Worker(self._service, stub=self._stub, signalling=pb.SIGNALLING_RING).attach()

    def _renew(self) -> None:
        """End the session, in good order or not, and open another."""
        with suppress(grpc.RpcError):  # it has ended by itself
            self._worker.close()
        self._worker.leave()
        self._counts["sessions"] += 1
        self._worker = self._new_worker()
        assert self._worker.works(), "a new session's answer is wrong"

    def close(self) -> None:
        self._renew()
        self._worker.close()
        self._worker.leave()

    def __str__(self) -> str:
        return tally(self._counts)


def _int32(chance: random.Random) -> int:
    edges = (-1, -(2**31), 2**31 - 1, 0, 1, 255, 256, 257)
    return chance.choice([*edges, chance.randrange(-(2**31), 2**31), chance.randrange(0, 300)])
