"""The control group that this process is in, and the processors that it may use.

Containers mostly have version 2 of control groups (`cpu.max`, `memory.max`), some machines version 1
(`cpu.cfs_quota_us`, `memory.limit_in_bytes`). A limit of an ancestor holds too.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")


def group_folders(controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of the groups that a controller ("cpu", "memory") limits this process by: its own,
    and all above it."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, root = 2, ROOT
        elif controller in controllers.split(","):
            version, root = 1, ROOT / controller
        else:
            continue
        place = root / path.lstrip("/")
        yield from ((version, folder) for folder in (place, *place.parents) if folder.is_relative_to(root))


def usable_processors() -> int:
    """Processors whose time this process may use: by its affinity, and by its control group's quota, rounded
    down. A thread too many waits for the quota at every barrier, and all others wait for it."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *(int(quota) for quota in _quotas())]))


def _quotas() -> Iterator[float]:
    """Processors that each group's quota is worth."""
    for version, folder in group_folders("cpu"):
        with suppress(OSError, ValueError):  # no such file, or "max" where nothing is limited
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
                quota, period = (int((folder / name).read_text()) for name in names)
            if quota > 0 and period > 0:  # -1 where nothing is limited
                yield quota / period
