"""The step recorded inside vLLM, on Triton's interpreter."""

from functools import partial

from tests.data.recording import load
from tests.gates.kernels import Run
from tests.kernels.recorded_checks import CHECKS

RUNS = [Run(f"recorded: {check.__name__}", partial(check, load(), "triton")) for check in CHECKS]
