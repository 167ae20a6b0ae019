"""The project on the oldest and the newest protobuf that it allows."""

from collections.abc import Callable
from pathlib import Path

import pytest

ROUND_TRIP = """
import google.protobuf
from dsa_indexer.v1 import indexer_pb2 as pb, indexer_pb2_grpc

request = pb.OpenSessionRequest(
    worker=pb.Worker(instance="a", pid=7, group=pb.Group(name="tp", rank=1, size=2)),
    geometry=pb.Geometry(layers=[0, 3], heads=64, head_dim=128, max_context=1 << 40),
    layout=pb.HandoffLayout(version=1, fingerprint=(1 << 64) - 1, slots=2),
    placement=pb.PLACEMENT_CPU,
)
assert pb.OpenSessionRequest.FromString(request.SerializeToString()) == request

configuration = pb.EngineConfiguration(engine="triton", settings={"a": "1", "b": ""})
assert pb.EngineConfiguration.FromString(configuration.SerializeToString()) == configuration

region = pb.Region(name="k_cache/3", host=pb.HostMemory(token=9), shape=[2], strides=[-1])
parsed = pb.Region.FromString(region.SerializeToString())
assert parsed == region and parsed.WhichOneof("memory") == "host"

plan = pb.StepPlan(step=1 << 63, exact=pb.ExactValues(seq_lens=[-1, 5]))
parsed = pb.StepPlan.FromString(plan.SerializeToString())
assert parsed == plan and parsed.HasField("exact") and not parsed.HasField("trace")

assert callable(indexer_pb2_grpc.add_IndexerServiceServicer_to_server)
print(google.protobuf.__version__, pb.__file__)
"""


@pytest.mark.parametrize("version", ["5.29.6", "7.36.2"])
def test_stubs_import_and_round_trip(
    version: str,
    installed: Path,
    protobuf: Callable[[str], Path],
    python: Callable[..., str],
) -> None:
    seen, file = python(ROUND_TRIP, protobuf(version), installed).split()
    assert seen == version
    assert file == f"{installed}/dsa_indexer/v1/indexer_pb2.py"


EVERYTHING = """
import google.protobuf, attention_worker.fallback, dsa_indexer_cli.main, indexer_client
import indexer_service.server as server
print(google.protobuf.__version__, server.__file__)
"""


@pytest.mark.parametrize("version", ["5.29.6", "7.36.2"])
def test_service_client_and_command_import(
    version: str,
    installed: Path,
    protobuf: Callable[[str], Path],
    python: Callable[..., str],
) -> None:
    seen, file = python(EVERYTHING, protobuf(version), installed).split()
    assert seen == version
    assert file == f"{installed}/indexer_service/server.py"
