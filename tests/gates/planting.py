"""Faults planted in the source of modules, for as long as a run takes."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.gates.kernels import Run, runs
from tests.gates.planted_gluon import FAULTS, Fault


def faulty_runs() -> list[Run]:
    """Every fault's run, under the fault's name."""
    checks = {run.name: run.check for run in runs()}

    def faulty(name: str, fault: Fault) -> Run:
        def check() -> None:
            with _planted(fault):
                checks[fault.run]()

        return Run(name, check)

    return [faulty(name, fault) for name, fault in FAULTS.items()]


@contextmanager
def _planted(fault: Fault) -> Iterator[None]:
    origin = Path(str(import_module(fault.module).__file__))
    source = origin.read_text()
    if source.count(fault.there) != 1:
        raise LookupError(f"{fault.there!r} stands {source.count(fault.there)} times in {origin}")
    with TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / origin.name
        path.write_text(source.replace(fault.there, fault.instead))
        stack.enter_context(_loaded(fault.module, path))
        for user in fault.users:
            stack.enter_context(_loaded(user, Path(str(import_module(user).__file__))))
        yield


@contextmanager
def _loaded(module: str, path: Path) -> Iterator[None]:
    """Another file's module in the place of one."""
    package, _, name = module.rpartition(".")
    spec = spec_from_file_location(module, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as {module}")
    before, loaded = sys.modules[module], module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
        setattr(sys.modules[package], name, loaded)
        yield
    finally:
        sys.modules[module] = before
        setattr(sys.modules[package], name, before)
