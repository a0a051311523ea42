"""Part `kernels`: Triton's kernels against their plain twins, in every type; in its interpreter on a
processor."""

import os
import runpy
from importlib.util import find_spec
from pathlib import Path

from coserve_benchmarks.gpu.log import PartLog

_CASES = Path(__file__).parents[3] / "tests" / "unit" / "kernels" / "triton_cases.py"


def run_bare(log: PartLog, device: str) -> None:
    """Runs the tests' own cases, which raise AssertionError."""
    if find_spec("triton") is None:
        log.failure("Triton is not installed: rows of several adapters are multiplied one after the other")
        return
    if not _CASES.exists():
        log.failure(f"{_CASES} is not there")
        return
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    runpy.run_path(str(_CASES), run_name="__main__")
    log.figure("kernels.equal", 1, "all cases")
