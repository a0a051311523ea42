"""Memory of packed weights on the way back, by the process's own size."""

import os
import subprocess
import sys

import pytest
import torch

from coserve.kernels.cpu import multiplies_bfloat16

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
return_freed_memory()
print(private_bytes() - before, max(linear.backward_nbytes for linear in linears))
"""


@pytest.mark.skipif(
    not multiplies_bfloat16(torch.ones(1, dtype=torch.bfloat16)),
    reason="weights are packed for processors that multiply bfloat16",
)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators are not told what to keep")
def test_going_back_keeps_no_second_base() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", BACK], env=env, capture_output=True, text=True, check=True)
    grown, unpacked = map(int, ran.stdout.split())
    assert grown < 4 * unpacked + (8 << 20)  # of 104 MB of weights
