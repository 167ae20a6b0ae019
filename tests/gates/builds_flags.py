"""What is compiled of the worker's flags and of the GPU's clock."""

from tests.gates.kernels import ARCHITECTURES, Build

_FLAG = "ipc_handoff.kernels.flag:flag_kernel"
_TYPES = {"state": "*i64", "request": "i64", "answer": "i64"}

BUILDS = [
    Build(
        "flag", _FLAG, _TYPES, {"PTX": True, "PDL": pdl}, {"num_warps": 1},
        tuple(arch for arch in ARCHITECTURES if (arch >= 90) == pdl),
    )
    for pdl in (False, True)
] + [
    Build(
        "clock", "ipc_handoff.kernels.clock:clock_kernel", {"out": "*i64"}, {"PTX": True},
        {"num_warps": 1},
    )
]  # fmt: skip
