"""The faults of other indexers, on Triton's interpreter: small inputs of each."""

from functools import partial

from tests.gates.kernels import Run
from tests.kernels.peer_faults import CHECKS, Where

_INTERPRETER = Where("cpu", "triton", interpreted=True)

RUNS = [Run(f"peer fault: {check.__name__}", partial(check, _INTERPRETER)) for check in CHECKS]
