"""What is compiled of the hand-over."""

from typing import Any

from ipc_handoff.kernels import wait
from tests.gates.kernels import ARCHITECTURES, Build

_HERE = "ipc_handoff.kernels"
_OLD = tuple(arch for arch in ARCHITECTURES if arch < 90)
_NEW = tuple(arch for arch in ARCHITECTURES if arch >= 90)

_TYPES = (
    dict.fromkeys((
            "state", "order", "told", "step_word", "closing", "progress", "begun", "found",
            "entries",
        ),
        "*i64",
    )
    | dict.fromkeys(
        ("decision", "live", "arrived", "query_start", "seq_lens", "block_table", "out"), "*i32"
    )
    | dict(q="*u8", weights="*fp32")
    | dict.fromkeys(
        (
            "ordinal", "first", "rows", "requests", "given", "needed", "table_width", "cells",
            "gate", "stamped",
        ),
        "i32",
    )
    | dict.fromkeys(
        (
            "step", "attachment", "table_stride", "staging", "answers", "staging_slot",
            "answer_slot", "staged", "answer", "query_start_at", "seq_lens_at", "table_at",
            "stamps", "stamp_stride", "q_stride",
            "weights_stride", "q_at", "weights_at", "bound", "out_stride",
        ),
        "i64",
    )
)  # fmt: skip

_ARGUMENTS = {
    "publish": "query_start seq_lens block_table state arrived step attachment rows requests given "
    "needed table_stride staging answers staging_slot answer_slot query_start_at seq_lens_at "
    "table_at table_width stamps cells",
    "stage": "q weights state decision arrived ordinal first rows q_stride weights_stride q_at "
    "weights_at",
    "wait": "state decision order told begun found entries out ordinal bound rows out_stride",
    "hand_back": "state decision found entries out rows ordinal out_stride",
    "share": "state begun found entries out rows ordinal out_stride",
    "gate": "step_word live closing staging answers staged answer gate ordinal bound stamps "
    "stamped stamp_stride cells",
    "done": "step_word live progress arrived answers ordinal staged answer stamps stamped "
    "stamp_stride",
}
_UNALIGNED = {
    "publish": ("query_start", "seq_lens", "block_table"),
    "stage": ("q", "weights"),
    "wait": ("out",),
    "hand_back": ("out",),
    "share": ("out",),
}


def _build(name: str, label: str, warps: int, pdl: bool | None, **constants: Any) -> Build:
    if pdl is not None:
        constants["PDL"] = pdl
    return Build(
        f"{name} {label}".strip(),
        f"{_HERE}.{name}:{name}_kernel",
        {argument: _TYPES[argument] for argument in _ARGUMENTS[name].split()},
        {**constants, "PTX": True},
        dict(num_warps=warps),
        ARCHITECTURES if pdl is None else _NEW if pdl else _OLD,
        unaligned=_UNALIGNED.get(name, ()),
    )


BUILDS = [
    _build("publish", "", 4, None, BLOCK=512),
    *(
        build
        for pdl in (False, True)
        for build in (
            _build("stage", "", 8, pdl, Q_BYTES=8192, HEADS=64, BLOCK_Q=8192, BLOCK_H=64,
                   VECTOR=16),
            _build("stage", "48 heads, unaligned", 8, pdl, Q_BYTES=6144, HEADS=48, BLOCK_Q=8192,
                   BLOCK_H=64, VECTOR=1),
            _build("wait", "", 1, pdl, ROWS=0, K=2048, BLOCK=2048, VECTOR=16, CHECKED=True),
            _build("wait", "and hand back", 1, pdl, ROWS=wait.FEW_ROWS, K=2048, BLOCK=1024,
                   VECTOR=16, CHECKED=True),
            _build("wait", "and hand back, unchecked", 1, pdl, ROWS=wait.FEW_ROWS, K=2048,
                   BLOCK=1024, VECTOR=16, CHECKED=False),
            _build("hand_back", "", 8, pdl, TOGETHER=1, K=2048, BLOCK=2048, VECTOR=16,
                   CHECKED=True),
            _build("hand_back", "many rows", 8, pdl, TOGETHER=4, K=2048, BLOCK=2048, VECTOR=16,
                   CHECKED=True),
            _build("hand_back", "k 100, unaligned", 8, pdl, TOGETHER=1, K=100, BLOCK=128,
                   VECTOR=4, CHECKED=True),
            _build("share", "", 4, pdl, K=2048, BLOCK=2048),
            _build("gate", "", 1, pdl),
            _build("done", "", 1, pdl),
        )
    ),
]  # fmt: skip
