"""The inline assembly of the Gluon kernels: a few PTX instructions over packed registers."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl

from tests.gates import interpreter as repaired

_WORD = re.compile(r"[$%\w]+")


def _prmt(a: Any, b: Any, selector: Any) -> Any:
    """Four bytes chosen from the eight of b (above) and a."""
    bytes_ = [(source >> np.uint32(8 * i)) & np.uint32(0xFF) for source in (a, b) for i in range(4)]
    result = np.zeros_like(a)
    for place in range(4):
        chosen = (int(selector) >> (4 * place)) & 0xF
        if chosen > 7:
            raise NotImplementedError(f"prmt.b32 that repeats signs: selector {selector:#x}")
        result |= bytes_[chosen] << np.uint32(8 * place)
    return result


def _pack_e4m3(high: Any, low: Any) -> Any:
    codes = [
        repaired._converted(number.view(np.float32), tl.float32, tl.float8e4nv, None)
        for number in (high, low)
    ]
    return (codes[0].astype(np.uint32) << np.uint32(8)) | codes[1]


_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "prmt.b32": _prmt,
    "cvt.rn.satfinite.e4m3x2.f32": _pack_e4m3,
}


def run(text: str, inputs: Sequence[Any], outputs: int) -> list[Any]:
    """Run the text for all lanes.

    Args:
        text: PTX; $0.. are the outputs, the inputs follow.
        inputs: uint32 [lanes] each.

    Returns:
        uint32 [lanes] for each output.

    Raises:
        NotImplementedError: an instruction is not known here.
    """
    names: dict[str, Any] = {f"${outputs + i}": values for i, values in enumerate(inputs)}

    def value(word: str) -> Any:
        if word in names:
            return names[word]
        return np.uint32(int(word, 0))

    for line in (line.strip() for line in text.replace("\n", " ").split(";")):
        line = line.strip("{} ") if line.count("{") != line.count("}") else line
        if not line or line.startswith(".reg"):
            continue
        operation, _, rest = line.partition(" ")
        pair = re.fullmatch(r"(\S+), \{(\w+), (\w+)\}", rest.strip())
        if operation == "mov.b32" and pair:
            names[pair[1]] = (value(pair[3]) << np.uint32(16)) | (value(pair[2]) & 0xFFFF)
        elif operation in _INSTRUCTIONS:
            to, *operands = _WORD.findall(rest)
            names[to] = _INSTRUCTIONS[operation](*map(value, operands))
        else:
            raise NotImplementedError(f"inline assembly: {operation} is not known here")
    return [names[f"${i}"] for i in range(outputs)]


def registers(elements: Any, pack: int) -> list[Any]:
    """[threads, elements] -> the 32-bit registers of `pack` elements each, uint32 [lanes]."""
    grouped = np.ascontiguousarray(elements.reshape(-1, pack))
    words = grouped.view(np.uint8).reshape(len(grouped), -1)
    if words.shape[1] % 4:
        words = np.pad(words, ((0, 0), (0, -words.shape[1] % 4)))
    words = np.ascontiguousarray(words).view(np.uint32)
    return [words[:, i].copy() for i in range(words.shape[1])]


def elements(words: Any, item: Any, pack: int) -> Any:
    """The opposite, of one register a group: [lanes * pack]."""
    size = pack * item.itemsize
    if size > 4:
        raise NotImplementedError("inline assembly: results of more than one register")
    return words[:, None].view(np.uint8)[:, :size].copy().view(item).ravel()
