"""Processes of ranks that stand by, as a standby engine does: their imports are done before they are needed.

An engine's own process has imported what it needs when it is told to start. Its ranks are processes that
begin then, and whose imports take as long as all else.
"""

import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from coserve.executors.worker_process import WorkerProcess
from coserve.parallel.ranks import is_stopped

_PATIENCE: Final = 120.0  # seconds for imports; one that takes longer is used as it is
_spares: list[WorkerProcess] = []


def keep_spares(count: int) -> None:
    """Starts so many processes, and waits until they have done their imports, at the lowest priority. They
    end with this process."""
    found = [WorkerProcess(_start) for _ in range(count)]
    for spare in found:
        select.select([spare.signals], [], [], _PATIENCE)
    _spares.extend(found)


def take_spare(name: str) -> WorkerProcess | None:
    """Gives a process that stands by, which is called `name` from now on; None where there is none."""
    while _spares:
        spare = _spares.pop(0)
        if spare.process.poll() is None and not is_stopped(spare.process.pid):
            spare.name = name
            return spare
        spare.process.kill()
    return None


def _start(descriptors: Sequence[int]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "coserve.worker.standby", *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=2,
    )
