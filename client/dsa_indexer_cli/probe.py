"""`python -m dsa_indexer_cli.probe`: whether a service is ready, for supervisors.

A module of its own and not a subcommand: a supervisor asks every few seconds. This loads gRPC and
nothing else: neither torch, as `dsa-indexer status` does, nor what options are declared with.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ipc_handoff.addresses import check_address, default_address

_CALL_SECONDS = 2.0
_PAUSE_SECONDS = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 if the service is as asked for."""
    asked = _parser().parse_args(arguments)
    try:
        check_address(asked.address)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + asked.wait
    while True:
        found = state(asked.address)
        if found == "SERVING" or (asked.live and found == "NOT_SERVING"):
            return 0
        if time.monotonic() >= deadline:
            print(f"{asked.address}: {found}", file=sys.stderr)
            return 1
        time.sleep(_PAUSE_SECONDS)


def state(address: str) -> str:
    """What `grpc.health.v1` answers at `address`, or the code with which no answer came."""
    # A pool of its own: after a failure the shared one waits before it connects again.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_CALL_SECONDS
            )
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dsa_indexer_cli.probe",
        description="Ends with status 0 if the service takes sessions. Over TCP: loopback only.",
    )
    parser.add_argument(
        "--address",
        default=os.environ.get("DSA_INDEXER_ADDRESS") or default_address(),
        help="unix:PATH or HOST:PORT (DSA_INDEXER_ADDRESS)",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="enough if it answers at all, as while it warms up or shuts down",
    )
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="ask again for so long"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
