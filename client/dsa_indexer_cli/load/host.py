"""What a load test runs against: the service that is given, one that is started, or none."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer_cli.children import ChildFailed
from dsa_indexer_cli.demo.service_process import ServiceProcess, own_environment
from dsa_indexer_cli.doctor_gpus import look, may_have_gpus
from dsa_indexer_cli.gpu_facts import Gpu, GpuFacts
from dsa_indexer_cli.load.host_worker import HostWorker
from dsa_indexer_cli.load.messages import Order, WorkerFactory
from dsa_indexer_cli.load.worker import Tell, Worker
from dsa_indexer_cli.load.workload import AUTO, CPU, INLINE, MPS, PEER_GPU, Load, WorkloadError
from dsa_indexer_cli.mps import mps_daemon
from indexer_client import ClientSettings
from indexer_client.control_plane import ControlPlane
from ipc_handoff.addresses import UNIX

_KEPT = ("DSA_INDEXER_CACHE_DIR", "DSA_INDEXER_FORCE_ARCH")
"""Variables that also count for a service of the load test's own: which kernels, and what tuned."""
_START_SECONDS = {True: 180.0, False: 60.0}
"""On a GPU, and on a CPU."""


@dataclass(frozen=True)
class Host:
    """Attributes:
    address: of the service; empty: there is none.
    status: of the service, before the test.
    gpu: the sessions' GPU, by name; empty: they are on the CPU.
    environment: variables for the sessions' processes.
    """

    address: str
    status: pb.GetStatusResponse
    make_worker: WorkerFactory = field(default=HostWorker)
    gpu: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def on_gpu(order: Order) -> Worker:
    """Makes the worker of a session on a GPU."""
    worker: Worker = import_module("dsa_indexer_cli.load.gpu_worker").make_gpu_worker(order)
    return worker


@contextmanager
def host_of(load: Load, address: str | None, tell: Tell) -> Iterator[Host]:
    """Find out where the sessions run and what they ask.

    Args:
        address: of a running service; None: start one, and end it at the end.
        tell: told what takes its time.

    Raises:
        IndexerError: no service answers at the address.
        RuntimeError: the service did not start, or the placement cannot be had.
        WorkloadError: there is no such GPU.
    """
    if load.placement == INLINE:
        yield _without_service(load)
    elif address is not None:
        yield _running(load, address, status_of(address))
    else:
        with _own(load, tell) as host:
            yield host


def status_of(address: str) -> pb.GetStatusResponse:
    """What a service says of itself. Raises IndexerError: nobody answers."""
    control_plane = ControlPlane(ClientSettings(address=address))
    try:
        return control_plane.get_status()
    finally:
        control_plane.close()


def _without_service(load: Load) -> Host:
    facts = _facts(is_needed=False)
    if facts is None:
        return Host("", pb.GetStatusResponse())
    return Host("", pb.GetStatusResponse(), on_gpu, _gpu(facts, load.device).name)


def _running(load: Load, address: str, status: pb.GetStatusResponse) -> Host:
    if not status.gpu_uuid:
        if load.placement not in (AUTO, CPU):
            raise RuntimeError(
                f"load.placement: {load.placement}, but the service at {address} is on the CPU "
                "(fix: a service on a GPU, or auto)"
            )
        return Host(address, status)
    if load.placement == CPU:
        raise RuntimeError(
            f"load.placement: cpu, but the service at {address} is on a GPU (fix: auto, or a "
            "service with --device cpu)"
        )
    facts = _facts(is_needed=True)
    assert facts is not None
    return Host(address, status, on_gpu, _gpu(facts, load.device).name)


@contextmanager
def _own(load: Load, tell: Tell) -> Iterator[Host]:
    facts = None if load.placement == CPU else _facts(is_needed=load.placement != AUTO)
    with ExitStack() as stack:
        prefix = "dsa-indexer-load-"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)))
        stack.enter_context(own_environment(_KEPT))
        device, name, variables = CPU, "", dict[str, str]()
        if facts is not None:
            gpu = _gpu(facts, load.device)
            device, name = f"cuda:{_service_device(load, gpu)}", gpu.name
            if load.placement == MPS and not gpu.under_mps:
                tell("starting an MPS daemon")
                variables = stack.enter_context(mps_daemon(folder / "mps"))
        tell("starting a service")
        # Not for longer: the process that sessions fork from outlives this test and its daemon.
        with _set(variables):
            address = stack.enter_context(_service(folder, device))
        worker = HostWorker if facts is None else on_gpu
        yield Host(address, status_of(address), worker, name, variables)


@contextmanager
def _service(folder: Path, device: str) -> Iterator[str]:
    address, log = f"{UNIX}{folder / 'sockets' / 'indexer.sock'}", folder / "service.log"
    service = ServiceProcess(address, None, log, device=device)
    try:
        service.start(_START_SECONDS[device != CPU])
        yield address
        status = service.stop()
        if status != 0:
            raise RuntimeError(f"the service ended with status {status}")
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{_tail(log)}") from None
    finally:
        service.stop()  # not `kill`: see README.md of what that does under MPS


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-5:]) if log.exists() else ""


def _facts(*, is_needed: bool) -> GpuFacts | None:
    """The host's GPUs; None if there are none.

    Raises:
        RuntimeError: there are none, and one is needed.
    """
    if not is_needed and not may_have_gpus():
        return None
    try:
        facts = look()
    except ChildFailed as error:
        if is_needed:
            raise RuntimeError(f"load.placement: needs a GPU: {error}") from None
        return None
    return facts if facts.gpus else None


def _gpu(facts: GpuFacts, ordinal: int) -> Gpu:
    with suppress(IndexError):
        return facts.gpus[ordinal]
    raise WorkloadError(
        f"load.device: {ordinal}, and {len(facts.gpus)} GPUs are visible (fix: 0 to "
        f"{len(facts.gpus) - 1}, or another CUDA_VISIBLE_DEVICES)"
    )


def _service_device(load: Load, gpu: Gpu) -> int:
    """Ordinal of the GPU for a service of one's own."""
    if load.placement != PEER_GPU:
        return gpu.ordinal
    if not gpu.peers:
        raise RuntimeError(
            f"load.placement: peer_gpu, but no GPU can be reached from GPU {gpu.ordinal} (fix: "
            "GPUs with NVLink or peer access over PCIe, visible to this process)"
        )
    return gpu.peers[0]


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """In this process's environment, which the service inherits."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
