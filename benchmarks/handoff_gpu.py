"""What the hand-over costs on a GPU: every placement against the same kernels in one process.

    python benchmarks/handoff_gpu.py [--results FOLDER] [--placement mps ...] [--shape 8x65536 ...]
    python benchmarks/handoff_gpu.py --document benchmarks/results/FILE

Starts services and workers of its own, and an MPS daemon for the placement that needs one. The
worker's graph of 61 layers runs inline and with the service in turns; every selection is compared.
Placements can run one by one: the day's file keeps those that a run leaves out.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from handoff_documents import document as write_document
from results_file import RESULTS, by_name, card, write

from dsa_indexer_cli.mps import mps_daemon
from indexer_client import ClientSettings, IndexerError
from indexer_client.control_plane import ControlPlane

WORKER = Path(__file__).with_name("handoff_gpu_worker.py")
PLACEMENTS = ("inline", "mps", "peer_gpu", "timeslice")
WORKER_SECONDS, READY_SECONDS = 300, 120
PACKAGES = ("dsa-indexer", "torch", "triton", "cuda-bindings")


@contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """A daemon, and the environment of its clients."""
    with mps_daemon(folder) as variables:
        yield {**os.environ, **variables}


@contextmanager
def service(folder: Path, device: int, environment: dict[str, str]) -> Iterator[str]:
    """A service on a GPU; its address."""
    address = f"unix:{folder / 'service' / 'indexer.sock'}"
    command = [sys.executable, "-m", "dsa_indexer_cli", "serve", "--address", address]
    log = folder / "service.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--device", f"cuda:{device}"], env=environment, stdout=file, stderr=file
        )
        try:
            wait_until_it_serves(address, process, log)
            yield address
        finally:
            process.terminate()
            process.wait(30)


def wait_until_it_serves(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    settings = ClientSettings(address=address, rpc_timeout_seconds=2.0)
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        control_plane = ControlPlane(settings)
        try:
            if control_plane.get_status().serving:
                return
        except IndexerError:
            time.sleep(0.05)
        finally:
            control_plane.close()
    raise RuntimeError(f"the service does not serve:\n{log.read_text()[-3000:]}")


def _workers(
    placement: str, address: str, device: int, what: Sequence[str], environment: dict[str, str],
    count: int = 1,
) -> list[dict[str, Any]]:  # fmt: skip
    """What so many workers measured, side by side."""
    command = [sys.executable, str(WORKER), placement, address, str(device), *what]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    told = []
    for process in processes:
        output, _ = process.communicate(timeout=WORKER_SECONDS)
        if process.returncode:
            raise RuntimeError(f"a worker ended with {process.returncode}")
        told.append(json.loads(output.splitlines()[-1]))
    return told


def _same_gpu(
    placement: str, environment: dict[str, str], what: Sequence[str], beside: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, service(Path(folder), 0, environment) as address:
        wanted = [*what, "beside"] if beside else what
        (found,) = _workers(placement, address, 0, wanted, environment)
        if beside:
            two = _workers(placement, address, 0, ["beside"], environment, count=2)
            found["one session"] = [found.pop("beside")]
            found["two sessions"] = [told["beside"] for told in two]
    return found


def measure(placements: Sequence[str], shapes: Sequence[str], beside: bool) -> dict[str, Any]:
    """By placement, what its worker measured, or why it was not measured."""
    found: dict[str, Any] = {}
    decode = ":".join(["decode", *shapes])
    what = [decode, "chunk"]
    environment = dict(os.environ)
    for placement in placements:
        try:
            with tempfile.TemporaryDirectory() as folder:
                if placement == "mps":
                    with mps(Path(folder) / "mps") as under:
                        found[placement] = _same_gpu(placement, under, what, beside)
                elif placement == "timeslice":
                    found[placement] = _same_gpu(placement, environment, what, beside=False)
                elif placement == "peer_gpu":
                    if torch.cuda.device_count() < 2:
                        raise RuntimeError("one GPU here")
                    with service(Path(folder), 1, environment) as address:
                        (found[placement],) = _workers(placement, address, 1, what, environment)
                else:  # the same kernels in one process, without a daemon
                    (found[placement],) = _workers("inline", "unix:/n", 0, [decode], environment)
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            found[placement] = {"not measured": str(error)[-2000:]}
        print(placement, json.dumps(found[placement])[:600], flush=True)
    return found


def main(
    results: Annotated[Path, typer.Option(help="Folder for the results file.")] = RESULTS,
    placement: Annotated[list[str] | None, typer.Option(help="Measure only these.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="REQUESTSxCONTEXT, only these.")] = None,
    beside: Annotated[bool, typer.Option(help="Also two sessions on one GPU.")] = True,
    document: Annotated[Path | None, typer.Option(help="Write docs from this file.")] = None,
) -> None:
    if document is not None:
        write_document(document)
        return
    if unknown := set(placement or ()) - set(PLACEMENTS):
        raise typer.BadParameter(f"{min(unknown)} (fix: one of {', '.join(PLACEMENTS)})")
    found = measure(placement or PLACEMENTS, shape or (), beside)
    name = torch.cuda.get_device_name(0)
    path = write(
        card(name), name, found, packages=PACKAGES, suffix="-handoff", folder=results,
        combine=by_name,
    )  # fmt: skip
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
