"""Memory of weights that are packed the second time, by the process's own size."""

import os
import subprocess
import sys

import pytest
import torch

from coserve.kernels.cpu import multiplies_bfloat16

# Layers of linears of several sizes: what one frees is no place for the next one's.
BACK = """
import torch
from coserve.memory.malloc import keep_freed_memory, private_bytes, return_freed_memory
from coserve.model.placement import PackedPlacement

keep_freed_memory()
sizes = [(640, 640), (160, 640), (160, 640), (640, 640), (1728, 640), (1728, 640), (640, 1728)] * 12
linears = [PackedPlacement(torch.ones(size, dtype=torch.bfloat16), None) for size in sizes]
return_freed_memory()
before = private_bytes()
for linear, (outputs, _) in zip(linears, sizes):
    linear.backward(torch.ones(8, outputs, dtype=torch.bfloat16))
print(private_bytes() - before, sum(2 * outputs * inputs for outputs, inputs in sizes))
"""


@pytest.mark.skipif(
    not multiplies_bfloat16(torch.ones(1, dtype=torch.bfloat16)),
    reason="weights are packed for processors that multiply bfloat16",
)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators are not told what to keep")
def test_going_back_takes_no_more_than_the_ledger_says() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", BACK], env=env, capture_output=True, text=True, check=True)
    grown, packed = map(int, ran.stdout.split())
    assert packed < grown < 1.15 * packed
