"""Kernels for GPUs, an optional extra: nothing here is imported unless `is_installed` says so."""

from functools import cache
from importlib.util import find_spec


@cache
def is_installed() -> bool:
    """Tells whether Triton is there."""
    return find_spec("triton") is not None
