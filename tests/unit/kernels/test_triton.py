"""Triton's kernels against the plain twins. Without a GPU they run in Triton's interpreter, in a process of
its own: the interpreter is chosen when Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

CASES = Path(__file__).with_name("triton_cases.py")


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", ["low rank", "rows", "attention", "states", "mixers"])
def test_every_kernel_equals_its_twin(part: str) -> None:
    """Cases of `triton_cases.py`: decode rows, long segments, both; ranks from 1 on, gaps, nobody's
    rows."""
    tests = Path(__file__).parents[2]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([*sys.path, str(tests)]))
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    found = subprocess.run(
        [sys.executable, str(CASES), part],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    assert found.stdout.split()[-1] == "equal"
