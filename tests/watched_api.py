"""The API's process with a clock on its event loop: `coserve.wire.launch watched_api` starts it.

`COSERVE_LOOP_CLOCK` names a file of four doubles: the longest stop of the loop so far by the clock, the
longest by what the process computed meanwhile, the number of looks, and the limit in seconds beyond which a
stop's stacks are written to stderr (0: none are). Whoever reads the file may set the first two to 0.
"""

import asyncio
import faulthandler
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

from coserve.serve import main as api

LOOK_SECONDS = 0.004
_FORM = struct.Struct("4d")


class LoopClock:
    """The file, as either process has it."""

    def __init__(self, path: Path, stacks: float = 0.0) -> None:
        if not path.exists():
            path.write_bytes(_FORM.pack(0.0, 0.0, 0.0, stacks))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORM.size)

    def read(self) -> tuple[float, float, float, float]:
        """(longest stop, longest computation, looks, limit for stacks)."""
        wall, used, looks, stacks = _FORM.unpack(self._memory[:])
        return wall, used, looks, stacks

    def note(self, wall: float, used: float) -> None:
        """Notes a look so many seconds, of the clock and of the process, after it was due."""
        longest, computed, looks, stacks = self.read()
        self._memory[:] = _FORM.pack(max(longest, wall), max(computed, used), looks + 1, stacks)

    def clear(self) -> None:
        """Forgets the stops so far."""
        _, _, looks, stacks = self.read()
        self._memory[:] = _FORM.pack(0.0, 0.0, looks, stacks)


async def watch(clock: LoopClock) -> None:
    """Notes how late the loop comes back to this coroutine, again and again.

    A stop by computation shows by the clock and by the process's own time; on a busy machine the former has
    in it what others computed, and the latter leaves that out: so the shorter of the two counts there.
    """
    stacks = clock.read()[3]
    while True:
        if stacks:
            faulthandler.dump_traceback_later(stacks)  # a thread of C, which needs no interpreter
        began, used = time.monotonic(), time.process_time()
        await asyncio.sleep(LOOK_SECONDS)
        wall = time.monotonic() - began - LOOK_SECONDS
        clock.note(wall, min(wall, time.process_time() - used))


def main(pipes: Any) -> None:
    beat = api._beat

    async def watched_beat(pipes: Any) -> None:
        watching = asyncio.create_task(watch(LoopClock(Path(os.environ["COSERVE_LOOP_CLOCK"]))))
        try:
            await beat(pipes)
        finally:
            watching.cancel()

    api._beat = watched_beat
    api.main(pipes)
