"""Runs a process under a limit of memory that the system enforces.

By a control group where one can be made, of version 1 or 2, without swap: pages of files that the group has
read count as well, and go when memory is short. Elsewhere the process's resident set is watched, and it is
killed once it is above the limit.
"""

import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from types import MappingProxyType
from typing import Final

import psutil

from coserve.errors import ServerError

# Folders of control groups, with the files of the limits on memory, and on memory and swap.
_GROUPS: Final = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"),
)
_OWN: Final = ("RssAnon", "RssShmem")  # a ring of buffers is shared memory, which no file has either
_LOOKS: Final = 0.02  # seconds between two looks


@dataclass(frozen=True, slots=True)
class Limited:
    """End of a limited process: `peak` is the most memory of its own, not of files, that was seen, in bytes;
    `how` says what enforced the limit."""

    returncode: int
    stdout: str
    stderr: str
    peak: int
    how: str

    @property
    def was_killed(self) -> bool:
        return self.returncode == -SIGKILL


def run_limited(
    command: Sequence[str],
    given: str,
    limit: int,
    patience: float,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Limited:
    """Runs a command with `given` on stdin and `settings` in its environment under a limit of
    bytes. Raises ServerError if it takes longer than
    `patience` seconds."""
    with _control_group(limit) as group:
        process = subprocess.Popen(
            [*_inside(group), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
        )
        watch = _MemoryWatch(process.pid, limit if group is None else None)
        watch.start()
        try:
            out, err = process.communicate(given, timeout=patience)
        except subprocess.TimeoutExpired:
            process.kill()
            _, err = process.communicate()
            raise ServerError(f"a limited process took over {patience:.0f} s: {err[-500:]}") from None
        finally:
            watch.join()
    how = "its resident set was watched" if group is None else "a control group"
    return Limited(process.returncode, out, err, watch.peak, how)


def own_nbytes(pid: int) -> int:
    """Bytes that a process holds in memory and no file has: anonymous and shared memory, as Linux counts
    them; 0 for a process that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return sum(int(fields[name].split()[0]) << 10 for name in _OWN if name in fields)
    return 0


@contextmanager
def _control_group(limit: int) -> Iterator[Path | None]:
    """A group of its own with this limit; None where none can be made."""
    for root, memory, swap in _GROUPS:
        group = root / f"coserve-bench-{os.getpid()}"
        try:
            group.mkdir()
            (group / memory).write_text(str(limit))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        with suppress(OSError):  # a system without swap may not have it
            (group / swap).write_text(str(limit) if "memsw" in swap else "0")
        try:
            yield group
        finally:
            group.rmdir()
        return
    yield None


def _inside(group: Path | None) -> list[str]:
    """A prefix with which a command runs in a group."""
    if group is None:
        return []
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]


class _MemoryWatch(threading.Thread):
    """Notes the most memory of a process until it ends; kills it above `limit`, if there is one."""

    def __init__(self, pid: int, limit: int | None) -> None:
        super().__init__(daemon=True)
        self._process, self._limit = psutil.Process(pid), limit
        self.peak = 0

    def run(self) -> None:
        with suppress(psutil.NoSuchProcess):
            while self._process.status() != psutil.STATUS_ZOMBIE:
                self.peak = max(self.peak, own_nbytes(self._process.pid))
                if self._limit is not None and self._process.memory_info().rss > self._limit:
                    self._process.kill()
                threading.Event().wait(_LOOKS)
