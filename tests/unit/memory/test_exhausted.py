"""Telling that memory ran out, and whose an error is."""

import resource
import subprocess
import sys

import pytest
import torch

from coserve.errors import (
    AdapterError,
    CoserveError,
    InternalError,
    JobError,
    OutOfMemory,
    TogetherFailed,
    WeightsUnreadable,
    WrongAnswer,
)
from coserve.memory.exhausted import failing_alone, is_out_of_memory, together

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


NOBODYS = [
    WeightsUnreadable("not now"),
    WrongAnswer("lies"),
    torch.AcceleratorError("CUDA error"),
    SystemExit(),
]


@pytest.mark.parametrize("error", NOBODYS, ids=repr)
def test_errors_of_all_are_raised(error: BaseException) -> None:
    """Of a pass that runs again, of the process, and of a device, which computes nothing after one."""
    failed = list[CoserveError]()
    with pytest.raises(type(error)), together("rows"):
        raise error
    with pytest.raises(type(error)), failing_alone("the request", failed.append):
        raise error
    assert not failed


def test_an_error_is_that_of_several_or_of_one() -> None:
    known, failed = AdapterError("as it is"), list[CoserveError]()
    with together("rows") as nothing:
        pass
    with together("rows") as words:
        raise KeyError("x")
    assert not nothing and words == ["rows failed: KeyError: 'x'"]
    with pytest.raises(TogetherFailed, match="can't allocate"), together("rows"):
        raise RuntimeError(CPU)
    for error in (known, ValueError("shapes"), torch.AcceleratorError("CUDA error: out of memory")):
        with failing_alone("job a", failed.append, JobError):
            raise error
    with failing_alone("the request", failed.append):
        raise ValueError("shapes")
    assert failed[0] is known and [type(one) for one in failed[1:]] == [JobError, OutOfMemory, InternalError]
    assert [str(one) for one in failed[1:]] == [
        "job a failed: ValueError: shapes",
        "job a ran out of memory: CUDA error: out of memory",
        "the request failed: ValueError: shapes",
    ]


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
