"""What is interpreted of ragged MQA logits: both forms against the reference, on small inputs."""

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from indexer_service.kernels import mqa_logits
from indexer_service.kernels.mqa_logits import ragged_launch as launching
from indexer_service.kernels.mqa_logits import ragged_plan as planning
from tests.gates.kernels import Run
from tests.kernels.inputs import Ragged, ragged

TOLERANCE = 5e-4
BOUNDS = [(0, 150), (10, 140), (149, 150), (70, 70), (120, 20), (-5, 999), (128, 150), (0, 1)]
"""Whole, inside, one key, empty, reversed, outside, the second tile alone, the first alone."""


def _case(heads: int, dim: int = 128, bounds: list[tuple[int, int]] = BOUNDS) -> Ragged:
    case = ragged(bounds, 150, heads=heads, dim=dim)
    case.k_scale = torch.rand(150, generator=torch.Generator().manual_seed(5)) + 0.1
    return case


def _same(ours: Tensor, expected: Tensor) -> None:
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(torch.isneginf(ours), torch.isneginf(expected))
    seen = expected.isfinite()
    difference = (ours.double() - expected.double())[seen].norm()
    relative = float(difference / expected.double()[seen].norm())
    assert relative <= TOLERANCE, f"relative error {relative:.2e}"


def _score(case: Ragged, arch: str, out: Tensor | None = None) -> Tensor:
    os.environ["DSA_INDEXER_FORCE_ARCH"] = arch
    return mqa_logits.ragged(*case.tensors, out=out, impl="triton")


def _expected(case: Ragged) -> Tensor:
    return mqa_logits.ragged(*case.tensors, impl="reference")


def _answers(arch: str, heads: int = 64, dim: int = 128) -> None:
    case = _case(heads, dim)
    _same(_score(case, arch), _expected(case))


def _codes(arch: str) -> None:
    case = ragged([(0, 256), (3, 250), (0, 256)], 256, heads=16, dim=128)
    case.k[:, 17] = torch.arange(256, dtype=torch.uint8)
    case.q[2, 3, 5] = 0xFF
    _same(_score(case, arch), _expected(case))


def _nan(arch: str) -> None:
    case = _case(16, 32)
    case.k_scale[3], case.weights[1, 0], case.weights[2, 1] = torch.nan, torch.nan, torch.inf
    _same(_score(case, arch), _expected(case))


def _strides(arch: str) -> None:
    case = _case(16, 32)
    expected = _expected(case)
    case.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    case.k = torch.cat([case.k, case.k], 1)[:, 32:]
    case.k_scale = case.k_scale.repeat_interleave(2)[::2]
    case.weights = case.weights.T.contiguous().T
    case.row_start = case.row_start.repeat_interleave(3)[::3]
    case.row_end = case.row_end.repeat_interleave(2)[::2]
    room = torch.full((len(expected), 2, 151), 77.0)
    _same(_score(case, arch, room[:, 1, 1:]), expected)
    assert (room[:, 0] == 77).all()
    assert (room[:, 1, 0] == 77).all()


def _parts(arch: str) -> None:
    """What the fused operation asks for: nothing outside the bounds, nothing when disabled."""
    case = _case(16, 32)
    os.environ["DSA_INDEXER_FORCE_ARCH"] = arch
    expected = _expected(case)
    seen = expected != -torch.inf
    for enabled in (1, 0):
        out = torch.full_like(expected, 77.0)
        word = torch.full((1,), enabled, dtype=torch.int32)
        launching.ragged(*case.tensors, out, fill=False, enabled=word)
        assert (out[~seen] == 77).all()
        if enabled:
            _same(torch.where(seen, out, -torch.inf), expected)
        else:
            assert (out == 77).all()


def _turns() -> None:
    """Keys and queries decoded a few at a time, within the bytes that were said."""
    case, device = _case(16, 32), torch.device("cpu")
    os.environ["DSA_INDEXER_FORCE_ARCH"] = "80"
    shape = (len(BOUNDS), 16, 32, 150)
    assert launching.decoded_bytes(*shape, device) == 2 * 32 * (150 + 16 * len(BOUNDS))
    workspace = 2 * 2 * 32 * 70
    assert launching.decoded_bytes(*shape, device, workspace) <= workspace
    out = torch.full((len(BOUNDS), 150), 77.0)
    launching.ragged(*case.tensors, out, workspace=workspace)
    _same(out, _expected(case))


def _overlapping() -> None:
    """The tiles of many keys, whose parts' products overlap: a tile and a half, and
    rows enough that the ring of queries turns."""
    bounds = [(0, 600), (500, 600), (0, 3), (10, 590), (550, 550)] * 2
    case = ragged(bounds, 600, heads=64, dim=128)
    os.environ["DSA_INDEXER_FORCE_ARCH"] = "90"
    (chosen,) = (one for one in planning.configurations(90) if one.overlap)
    out = torch.full((len(bounds), 600), 77.0)
    launching.ragged(*case.tensors, out, configuration=chosen)
    _same(out, _expected(case))


def _nothing() -> None:
    case = _case(16, 32, [])
    assert _score(case, "89").shape == (0, 150)
    case = ragged([(0, 5)], 0, heads=16, dim=32)
    assert _score(case, "89").shape == (1, 0)


_CASES: dict[str, Callable[[str], None]] = {
    "64 heads": partial(_answers, heads=64),
    "5 heads, 48 wide": partial(_answers, heads=5, dim=48),
    "128 heads": partial(_answers, heads=128, dim=32),
    "140 heads": partial(_answers, heads=140, dim=32),
    "every code": _codes,
    "NaN": _nan,
    "strides": _strides,
    "within bounds only": _parts,
}  # fmt: skip

RUNS = [
    *(
        Run(f"ragged logits sm{arch} {name}", partial(check, arch))
        for arch in ("80", "89", "90")
        for name, check in _CASES.items()
        if (arch, name) != ("90", "140 heads")  # which no kernel in Gluon serves
    ),
    Run("ragged logits sm90 overlapping", _overlapping),
    Run("ragged logits in turns", _turns),
    Run("ragged logits of nothing", _nothing),
]
