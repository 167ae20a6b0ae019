"""Compile every build for one architecture: `python -m tests.gates.compile_for 80 [planted...]`.

Prints one JSON line a build: name, error or null, bytes of shared memory (in all, and those of
inline assembly's own arrays), registers, stack bytes, and arguments that would make new kernels.
One process an architecture, because Triton keeps state of the first one it compiled for.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from indexer_service.kernels.architecture import HOPPER
from tests.gates.barriers import unordered
from tests.gates.kernels import Build, builds

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

_RESERVED = 1024
"""Bytes beside a program's own that a binary for SM90 and up counts, and the limits do not."""


def source(build: Build) -> ASTSource:
    module, name = build.kernel.split(":")
    kernel = getattr(import_module(module), name)
    names = kernel.arg_names
    signature = {name: build.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in build.constants.items()}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if str(signature[name]).startswith("*") and name not in build.unaligned
    }
    aligned |= {
        (place, within): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if isinstance(signature[name], tuple)
        for within in range(len(signature[name]))
    }
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(kernel, signature, constants, aligned)


def specialising(build: Build) -> list[str]:
    """Arguments whose values or alignment would make new kernels while a session runs."""
    module, name = build.kernel.split(":")
    return [
        parameter.name
        for parameter in getattr(import_module(module), name).params
        if not parameter.do_not_specialize
        and (
            str(build.types.get(parameter.name, "*")).startswith(("i", "u", "fp"))
            or (parameter.name in build.unaligned and not parameter.do_not_specialize_on_alignment)
        )
    ]


def resources(cubin: bytes, arch: int) -> tuple[int, int, int]:
    """As the binary says: registers a thread, bytes of stack (spills), and bytes of shared memory
    that are declared in it (inline assembly's), which are not among those that Triton asks for.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", said.stdout + said.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump said {said.stdout!r} {said.stderr!r}")
    registers, stack, shared = (int(number) for number in found.groups())
    return registers, stack, max(0, shared - (_RESERVED if arch >= HOPPER else 0))


def compiled(build: Build, arch: int) -> dict[str, Any]:
    result: dict[str, Any] = {"name": build.name, "error": None}
    try:
        target = GPUTarget("cuda", arch, 32)
        binary = triton.compile(source(build), target=target, options=dict(build.options))
    except Exception as error:
        cause = error.__cause__ or error
        return result | {"error": f"{type(cause).__name__}: {str(cause)[-400:]}"}
    registers, stack, static = resources(binary.asm["cubin"], arch)
    return result | {
        "shared": binary.metadata.shared + static, "static": static, "registers": registers,
        "stack": stack, "specialising": specialising(build),
        "unordered": unordered(binary.asm["ptx"]),
    }  # fmt: skip


def main(arch: int, *planted: str) -> None:
    chosen: Iterable[Build] = builds()
    if planted:
        from tests.gates.planted import BUILDS

        chosen = [replace(BUILDS[name], name=name) for name in planted]
    for build in chosen:
        if arch in build.architectures:
            print(json.dumps(compiled(build, arch)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
