"""Telling that memory ran out."""

import resource
import subprocess
import sys

import pytest
import torch

from coserve.memory.exhausted import is_out_of_memory

CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError(CPU),
     RuntimeError("not enough memory: you tried to allocate 8 bytes"), RuntimeError("std::bad_alloc")],
)  # fmt: skip
def test_memory_ran_out(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), ValueError("can't allocate memory"), KeyError("memory")]
)
def test_something_else_went_wrong(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are enforced on Linux")
def test_a_limit_of_the_system_shows_as_one() -> None:
    """In torch's allocator, where sizes are beyond any machine's and below one that is refused as such."""
    code = (
        "import resource, torch; from coserve.memory.exhausted import is_out_of_memory as o\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (2**31, 2**31))\n"
        "try: torch.empty(2**32)\n"
        "except RuntimeError as error: print(o(error))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "True"
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
