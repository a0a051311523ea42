"""Code that is kept for shapes of products: seen in what oneDNN says of the code that it builds."""

import os
import subprocess
import sys

import pytest
import torch

from coserve.kernels.cpu import multiplies_bfloat16
from coserve.memory.compiled import SHAPES

MORE = 8
PRODUCTS = f"""
from coserve.memory.compiled import SHAPES, bound_compiled_shapes
import torch
bound_compiled_shapes()
for rows in (*range(9, 9 + SHAPES + {MORE}), 9):
    torch.ones(rows, 64, dtype=torch.bfloat16) @ torch.ones(64, 48, dtype=torch.bfloat16)
"""


@pytest.mark.skipif(
    not multiplies_bfloat16(torch.ones(1, dtype=torch.bfloat16)),
    reason="on this processor torch multiplies bfloat16 without oneDNN, which then builds nothing",
)
def test_the_oldest_shape_is_forgotten() -> None:
    """Built again once as many others as are kept have been multiplied since; those are built once."""
    env = {**os.environ, "ONEDNN_VERBOSE": "profile_create", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PRODUCTS]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    built = [line for line in ran.stdout.splitlines() if "create:cache_miss" in line]
    assert len(built) == SHAPES + MORE + 1
    assert sum(",9x64:64x48," in line for line in built) == 2
