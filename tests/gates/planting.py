"""Faults planted in the source of modules, for as long as a run takes."""

from benchmarks.changed_source import Source, changed
from tests.gates.kernels import Run, runs
from tests.gates.planted_gluon import FAULTS, Fault


def faulty_runs() -> list[Run]:
    """Every fault's run, under the fault's name."""
    checks = {run.name: run.check for run in runs()}

    def faulty(name: str, fault: Fault) -> Run:
        source = Source(fault.module, fault.there, fault.instead, fault.users)

        def check() -> None:
            with changed(source):
                checks[fault.run]()

        return Run(name, check)

    return [faulty(name, fault) for name, fault in FAULTS.items()]
