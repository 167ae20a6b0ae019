"""What `dsa-indexer doctor` looks at on a host with GPUs."""

import os
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from dsa_indexer_cli.children import Child, ChildFailed
from dsa_indexer_cli.doctor_finding import Finding
from dsa_indexer_cli.gpu_facts import Gpu, GpuFacts
from dsa_indexer_cli.mps import CONTROL, is_served, mps_pipe
from ipc_handoff.allocators import allocator_to_change
from ipc_handoff.cuda_runtime import launches_block

DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
KERNEL_DRIVER = Path("/sys/module/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")
LOOK_PROGRAM = "dsa_indexer_cli.gpu_facts"
LOOK_SECONDS = 6.0

OLDEST = (8, 0)
"""Compute capability from which on the kernels run."""

PACKAGES = {"cuda-bindings": "cuda.bindings", "triton": "triton"}
"""By name, and a module of each."""

INSTALL = "pip install 'dsa-indexer[gpu]'"
_ROOT = 0


def may_have_gpus() -> bool:
    """False: nothing here speaks of a GPU, and no process is started in order to ask."""
    return has_device_files() or bool(_version("cuda-bindings"))


def has_device_files() -> bool:
    """Whether the kernel has an NVIDIA driver that this process may talk to."""
    return any(path.exists() for path in DEVICE_FILES)


def _version(package: str) -> str:
    """Empty: it is not installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    with suppress(ModuleNotFoundError):  # of the module's own package
        if find_spec(PACKAGES[package]):
            return "installed, of an unknown version"
    return ""


def look() -> GpuFacts:
    """Ask the driver, in a process of its own.

    Raises:
        ChildFailed: there is no GPU, no driver, or no answer; says what to do.
    """
    child = Child(LOOK_PROGRAM)
    try:
        if not child.wait(LOOK_SECONDS):
            raise ChildFailed(
                f"the driver does not answer within {LOOK_SECONDS:.0f} s {_who_holds_mps()}"
            )
        return GpuFacts.of_json(child.result())
    finally:
        child.close()


def _who_holds_mps() -> str:
    if is_served():
        return f"(fix: {another_mps()})"
    return "(fix: nvidia-smi must answer; see dmesg for Xid errors)"


def another_mps() -> str:
    """What to do where a daemon stands in the way."""
    return f"{mps_pipe()} is dead, busy or another user's: {start_mps(own_folder=True)}"


def driver_finding(facts: GpuFacts) -> Finding:
    """Whether the driver is new enough for the installed torch."""
    kernel = KERNEL_DRIVER.read_text().strip() if KERNEL_DRIVER.exists() else ""
    cuda = ".".join(map(str, facts.cuda))
    detail = f"CUDA {cuda}" + (f", driver {kernel}" if kernel else "")
    values = {"cuda": cuda, "driver": kernel, "torch_cuda": torch.version.cuda}
    if torch.version.cuda is None:
        fix = "a build of torch for CUDA"
        return Finding("driver", False, f"{detail}; torch is built without CUDA", fix, values)
    major = int(torch.version.cuda.split(".")[0])
    if facts.cuda[0] < major:
        return Finding(
            "driver",
            False,
            f"{detail}; torch is built for CUDA {torch.version.cuda}",
            f"a driver for CUDA {major} or newer, or torch built for CUDA {facts.cuda[0]}",
            values,
        )
    return Finding("driver", True, f"{detail}; torch for {torch.version.cuda}", values=values)


def gpu_finding(gpu: Gpu) -> Finding:
    capability = ".".join(map(str, gpu.capability))
    detail = f"{gpu.name}, {capability}, {gpu.memory_bytes / 2**30:.0f} GiB, {gpu.uuid}"
    values = {
        "uuid": gpu.uuid,
        "name": gpu.name,
        "compute_capability": capability,
        "memory_bytes": gpu.memory_bytes,
        "under_mps": gpu.under_mps,
        "peers": list(gpu.peers),
    }
    check = f"GPU {gpu.ordinal}"
    if gpu.capability >= OLDEST:
        return Finding(check, True, detail, values=values)
    # Another GPU may be meant for something else.
    ok = False if gpu.ordinal == 0 else None
    return Finding(check, ok, detail, "a GPU of compute capability 8.0 or newer", values)


def visibility_finding() -> Finding:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    detail = "not set: every GPU" if shown is None else repr(shown)
    return Finding("CUDA_VISIBLE_DEVICES", None, detail)


def peers_finding(facts: GpuFacts) -> Finding:
    if len(facts.gpus) < 2:
        return Finding("peer access", None, "one GPU is visible")
    pairs = [(g.ordinal, p) for g in facts.gpus for p in g.peers if g.ordinal < p]
    if pairs:
        shown = ", ".join(f"{own}-{peer}" for own, peer in pairs)
        return Finding("peer access", True, f"between GPUs {shown}")
    return Finding(
        "peer access",
        None,
        "none between the visible GPUs",
        "GPUs with NVLink or peer access over PCIe (nvidia-smi topo -p2p r)",
    )


def mps_finding(gpu: Gpu) -> Finding:
    """Whether a daemon serves a GPU, and if not, whose control pipe is in the way."""
    pipe = mps_pipe()
    values: dict[str, object] = {"serves": gpu.under_mps, "control": str(pipe)}
    try:
        owner: int | None = pipe.stat().st_uid
    except FileNotFoundError:
        owner = None
        found = f"there is no {pipe}"
    except OSError as error:
        owner = -1
        found = str(error)
    else:
        found = f"{pipe} is user {owner}'s"
    values["owner"] = owner
    if gpu.under_mps:
        return Finding("MPS", True, f"a daemon serves GPU {gpu.ordinal}: {found}", values=values)
    is_others = owner not in (None, os.getuid(), _ROOT)
    if is_others:
        found += ", and a daemon serves its own user only"
    elif owner is not None:
        found += ", but its daemon does not serve this process"
    return Finding(
        "MPS",
        None,
        f"no daemon serves GPU {gpu.ordinal}: {found}",
        start_mps(own_folder=owner is not None),
        values,
    )


def start_mps(*, own_folder: bool) -> str:
    """The command that starts a daemon. own_folder: not where another one's pipes are."""
    missing = "" if shutil.which(CONTROL) else f"install {CONTROL} (it comes with the driver); "
    same = "before engine and service start, in the same CUDA_MPS_PIPE_DIRECTORY"
    if own_folder:
        folder = f"/tmp/mps-{os.getuid()}"
        setting = f"CUDA_MPS_PIPE_DIRECTORY={folder} CUDA_MPS_LOG_DIRECTORY={folder}"
        return f"{missing}mkdir -p {folder} && export {setting} && {CONTROL} -d, {same}"
    return f"{missing}{CONTROL} -d, {same}"


def package_finding(package: str) -> Finding:
    found = _version(package)
    if found:
        return Finding(package, True, found)
    return Finding(package, False, "is not installed", INSTALL)


def launches_finding() -> Finding:
    if launches_block():
        return Finding(
            "CUDA_LAUNCH_BLOCKING",
            False,
            "is set: every wait would hold its process",
            "unset CUDA_LAUNCH_BLOCKING",
        )
    return Finding("CUDA_LAUNCH_BLOCKING", True, "not set")


def allocator_finding() -> Finding:
    """Whether torch's allocations can be exported: K caches are read where they lie."""
    change = allocator_to_change()
    if change is not None:
        variable, value = change
        return Finding(
            "allocator",
            False,
            f"{variable}={os.environ[variable]}: such memory has no CUDA IPC handle",
            f"export {variable}={value}",
        )
    return Finding("allocator", True, "its memory can be exported over CUDA IPC")


def shared_folder_finding() -> Finding:
    """MPS clients talk to their server through it."""
    try:
        size = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return Finding(str(SHARED_MEMORY), None, str(error), "in a container: --ipc=host")
    free = size.f_bavail * size.f_frsize
    return Finding(
        str(SHARED_MEMORY), None, f"{free / 2**20:.0f} MiB free", values={"free_bytes": free}
    )
