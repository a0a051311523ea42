"""An engine's budget of bytes: as configured, or most of the machine's."""

import resource
import subprocess
import sys

import pytest

from coserve.config import EngineConfig
from coserve.core.size import read_size, show_size
from coserve.errors import ConfigError
from coserve.memory.budget import Capacity, budget_of, process_capacity

CAPACITY = Capacity(total=1000 * 2**20, free=400 * 2**20)


@pytest.mark.parametrize(
    ("memory", "nbytes"),
    [
        ("6GiB", 6 * 2**30),
        ("500 MB", 500_000_000),
        ("1.5g", 1_500_000_000),
        ("4096", 4096),
        (123456789, 123456789),
        (0.25, 250 * 2**20),
        ("0.25", 250 * 2**20),
        ("25%", 250 * 2**20),
        ("auto", 360 * 2**20),
    ],
)
def test_a_budget_may_be_written_in_several_ways(memory: str | int | float, nbytes: int) -> None:
    assert budget_of(EngineConfig(memory=memory).memory, CAPACITY) == nbytes


@pytest.mark.parametrize("memory", ["", "much", "-1", "6 GiBs", 0, -5, 1.5, 0.0, "120%", "0%"])
def test_what_is_no_number_of_bytes_is_refused_with_the_setting(memory: str | int | float) -> None:
    with pytest.raises(ConfigError, match=r"engine\.memory"):
        EngineConfig(memory=memory)


def test_sizes_are_written_with_three_digits() -> None:
    assert [show_size(n) for n in (0, 1023, 5000, 1001 * 1024, 3 * 2**30)] == [
        "0 bytes", "1023 bytes", "4.88 KiB", "1001 KiB", "3 GiB",
    ]  # fmt: skip
    assert abs(read_size(show_size(123456789)) / 123456789 - 1) < 5e-3


def test_the_machine_has_memory_and_not_all_of_it_is_free() -> None:
    capacity = process_capacity()
    assert 0 < capacity.free < capacity.total


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are enforced on Linux")
def test_a_limit_of_the_process_counts() -> None:
    """A gigabyte, less what the process has mapped by then."""
    code = (
        "import resource; from coserve.memory.budget import process_capacity as p;"
        "resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30)); c = p(); print(c.total, c.free)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total, free = map(int, out.stdout.split())
    assert total == 2**30 and 2**29 < free < 2**30
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
