"""What is compiled of the worker's flags and of the GPU's clock."""

from tests.gates.kernels import ARCHITECTURES, Build

_FLAG = "ipc_handoff.kernels.flag:flag_kernel"
_TYPES = {"state": "*i64", "request": "i64", "answer": "i64"}
_TELL = "ipc_handoff.kernels.tell:tell_kernel"
_TELL_TYPES = {
    "step_word": "*i64", "live": "*i32", "progress": "*i64", "staging": "i64",
    "answer_flag": "i64", "progress_flag": "i64",
}  # fmt: skip
_GIVEN_UP = "ipc_handoff.kernels.tell:tell_given_up_kernel"
_GIVEN_UP_TYPES = {"step": "i64", "staging": "i64", "first_answer": "i64", "layers": "i32"}

BUILDS = [
    Build(
        name, kernel, types, {"PTX": True, "PDL": pdl}, {"num_warps": 1},
        tuple(arch for arch in ARCHITECTURES if (arch >= 90) == pdl),
    )
    for pdl in (False, True)
    for name, kernel, types in (
        ("flag", _FLAG, _TYPES),
        ("tell", _TELL, _TELL_TYPES),
        ("tell given up", _GIVEN_UP, _GIVEN_UP_TYPES),
    )
] + [
    Build(
        "clock", "ipc_handoff.kernels.clock:clock_kernel", {"out": "*i64"}, {"PTX": True},
        {"num_warps": 1},
    )
]  # fmt: skip
