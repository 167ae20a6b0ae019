"""The contract's gates, and that each of them closes on a planted fault."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

RELEASED = "proto/released/dsa_indexer.v1.binpb"
PROTO = "proto/dsa_indexer/v1/indexer.proto"


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    """A copy of the contract in which a fault can be planted."""
    target = tmp_path / "copy"
    shutil.copytree(repository / "proto", target / "proto")
    shutil.copy(repository / "buf.yaml", target)
    return target


def plant(tree: Path, old: str, new: str) -> None:
    """Replaces the first `old` in the contract of `tree`; fails if there is none."""
    path = tree / PROTO
    text = path.read_text()
    assert old in text, f"{old!r} is no longer in the contract: plant another fault"
    path.write_text(text.replace(old, new, 1))


def buf(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sysconfig.get_path("scripts"), "buf")), *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=60)


def stale_stubs(repository: Path, tree: Path, out: Path) -> list[str]:
    """Names of the stubs beside the contract of `tree` that its generation would change."""
    out.mkdir()
    # Without make's own variables, which an outer `make test` leaves in the environment.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    made = subprocess.run(
        ["make", "--silent", "stubs", f"PROTO_ROOT={tree / 'proto'}", f"STUBS_OUT={out}"],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, f"the stub generator did not run:\n{made.stdout}{made.stderr}"
    generated = {path.name: path.read_bytes() for path in out.rglob("*_pb2*")}
    beside = (tree / PROTO).parent
    committed = {path.name: path.read_bytes() for path in beside.glob("*_pb2*.py*")}
    names = generated.keys() | committed.keys()
    assert len(generated) == 4, sorted(generated)
    return sorted(name for name in names if generated.get(name) != committed.get(name))


def test_contract_passes_buf_lint(repository: Path) -> None:
    result = buf(repository, "lint")
    assert result.returncode == 0, result.stdout


def test_contract_is_compatible_with_the_released_one(repository: Path) -> None:
    result = buf(repository, "breaking", "--against", RELEASED)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("  fixed64 step = 1;\n", "", 'field "1" with name "step"'),
        ("  fixed64 step = 1;", "  uint64 step = 1;", "changed type"),
        ("  uint32 rows = 3;", "  uint32 rows = 33;", 'field "3" with name "rows"'),
        ("  PLACEMENT_MPS = 2;\n", "", 'enum value "2" on enum "Placement"'),
        (
            "  rpc KeepAlive(KeepAliveRequest) returns (KeepAliveResponse);\n",
            "",
            'RPC "KeepAlive"',
        ),
    ],
    ids=["removed field", "changed type", "renumbered field", "removed enum value", "removed rpc"],
)
def test_breaking_gate_closes(copy: Path, old: str, new: str, says: str) -> None:
    plant(copy, old, new)
    result = buf(copy, "breaking", "--against", RELEASED)
    assert result.returncode != 0
    assert says in result.stdout


def test_breaking_gate_lets_an_addition_pass(copy: Path) -> None:
    plant(copy, "message GetStatusRequest {}", "message GetStatusRequest {\n  bool verbose = 1;\n}")
    result = buf(copy, "breaking", "--against", RELEASED)
    assert result.returncode == 0, result.stdout


def test_lint_gate_closes(copy: Path) -> None:
    plant(copy, "SIGNALLING_RING = 1;", "RING = 1;")
    result = buf(copy, "lint")
    assert result.returncode != 0
    assert "SIGNALLING_" in result.stdout


def test_stubs_are_current(repository: Path, tmp_path: Path) -> None:
    stale = stale_stubs(repository, repository, tmp_path / "out")
    assert not stale, f"{stale} differ from the contract: run `make stubs`"


@pytest.mark.parametrize(
    ("old", "new", "stale"),
    [
        (
            "  // Renews the lease.",
            "  // Prolongs the lease.",
            ["indexer_pb2_grpc.py", "indexer_pb2_grpc.pyi"],
        ),
        (
            "message GetStatusRequest {}",
            "message GetStatusRequest { bool verbose = 1; }",
            ["indexer_pb2.py", "indexer_pb2.pyi"],
        ),
    ],
    ids=["comment", "field"],
)
def test_stale_stubs_are_seen(
    repository: Path, copy: Path, tmp_path: Path, old: str, new: str, stale: list[str]
) -> None:
    plant(copy, old, new)
    assert stale_stubs(repository, copy, tmp_path / "out") == stale


def test_missing_stub_is_seen(repository: Path, copy: Path, tmp_path: Path) -> None:
    (copy / PROTO).with_name("indexer_pb2_grpc.pyi").unlink()
    assert stale_stubs(repository, copy, tmp_path / "out") == ["indexer_pb2_grpc.pyi"]
