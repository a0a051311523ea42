"""Triton's kernels compile for a GPU, to machine code and within its shared memory. Its interpreter, in which
they are compared with their twins, takes what its compiler refuses. No GPU is needed, but Triton's compiler
must not have been told to interpret: so in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = Path(__file__).with_name("compiled_cases.py")


@pytest.mark.sample(1)
@pytest.mark.parametrize("third", ["0", "1", "2"])  # of the cases, of which each takes half a second
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_kernel_compiles(dtype: str, third: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(CASES), dtype, third],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert done.stdout.split()[-1] == "compiled"
