"""Memory budgets: the bytes of a device, and how many of them an engine may use."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coserve.core.control_group import group_folders
from coserve.core.size import read_memory

SHARE: Final = 0.9  # default share of the free bytes: other processes need some
_LIMIT_AND_USAGE: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes of a device: those this process can have at most, and those that are free now."""

    total: int
    free: int


def budget_of(memory: str | int | float, capacity: Capacity) -> int:
    """Bytes that `EngineConfig.memory` allows on a device. Raises ConfigError for invalid text."""
    match read_memory(memory):
        case None:
            return int(SHARE * capacity.free)
        case float() as share:
            return int(share * capacity.total)
        case nbytes:
            return nbytes


def process_capacity() -> Capacity:
    """Bytes left to this process by the system's memory, its control group and its own limits."""
    pairs = [*_system(), *_control_group(), *_own_limits()]
    assert pairs, "some system tells how much memory it has"
    return Capacity(min(total for total, _ in pairs), max(min(free for _, free in pairs), 0))


def _system() -> Iterator[tuple[int, int]]:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError):  # other systems count pages, and do not report free ones
        total = free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield total, free


def _control_group() -> Iterator[tuple[int, int]]:
    """Limits of the process's control group and its ancestors (cgroup v1 and v2)."""
    for version, folder in group_folders("memory"):
        limit, usage = _LIMIT_AND_USAGE[version]
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None:
            yield most, most - used


def _number(file: Path) -> int | None:
    """Number in a file of the control group; None where the file is missing or sets no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) < 1 << 60 else None


def _own_limits() -> Iterator[tuple[int, int]]:
    """RLIMIT_DATA and RLIMIT_AS, which bound mapped bytes, touched or not."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    except OSError:
        return
    for limit, mapped in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            yield most, most - int(fields[mapped].split()[0]) * 1024
