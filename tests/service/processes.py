"""Services in processes of their own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer.v1 import indexer_pb2_grpc as rpc
from tests.support.waiting import SOON, eventually

ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = """
import json, logging, sys
from indexer_service.serving import run
from indexer_service.settings import Settings
logging.basicConfig(level="INFO")
run(Settings(address=sys.argv[1], **json.loads(sys.argv[2])))
"""


class ServiceProcess:
    """A service in a process of its own."""

    def __init__(self, path: Path, log: Path, **settings: float | str) -> None:
        self.path, self.log = path, log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, f"unix:{path}", json.dumps(settings)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/proto"},
                stdout=output,
                stderr=output,
            )

    def wait_until_serving(self) -> "ServiceProcess":
        own = self.path.parent / f"{self.path.name}.{self.process.pid}"
        assert eventually(lambda: is_served_by(self.path, self.process.pid), 2 * SOON), (
            self.log.read_text()
        )
        assert own.is_socket()
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        return self.process.wait(SOON)


def is_served_by(path: Path, pid: int) -> bool:
    with grpc.insecure_channel(f"unix:{path}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            status = rpc.IndexerServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=SOON)
        except grpc.RpcError:
            return False
        return status.serving and status.pid == pid
