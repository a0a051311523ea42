"""Kernels for GPUs, an optional extra: imported only if `is_installed`."""

from functools import cache
from importlib.util import find_spec


@cache
def is_installed() -> bool:
    """Tells whether Triton is installed."""
    return find_spec("triton") is not None
