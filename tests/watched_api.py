"""The API's process with a clock on its event loop: `coserve.wire.launch watched_api` starts it.

`COSERVE_LOOP_CLOCK` names the file of a `LoopClock`. With `COSERVE_LOOP_STACKS` the stacks of all threads are
written to stderr when the loop has stood still for so many seconds.
"""

import asyncio
import faulthandler
import json
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, Final

from coserve.serve import main as api
from coserve.serve.settings import ApiStart, ServerSettings
from coserve.wire.control import encode_line
from forking import forked

LOOK_SECONDS: Final = 0.004
_FORM: Final = struct.Struct("3d")


class LoopClock:
    """Two numbers that both processes have in memory: the longest stop of the loop by the clock, and the
    longest by what the process computed meanwhile, in seconds since the last `take`."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_FORM.pack(0.0, 0.0, 0.0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORM.size)

    def note(self, stopped: float, computed: float) -> None:
        """Notes a look that came so much later than it was due."""
        longest, most, looks = _FORM.unpack(self._memory[:])
        self._memory[:] = _FORM.pack(max(longest, stopped), max(most, computed), looks + 1)

    def take(self) -> tuple[float, float]:
        """(longest stop, longest computation), which are 0 then."""
        longest, most, looks = _FORM.unpack(self._memory[:])
        self._memory[:] = _FORM.pack(0.0, 0.0, looks)
        return longest, most

    @property
    def looks(self) -> int:
        return int(_FORM.unpack(self._memory[:])[2])


async def watch(clock: LoopClock, stacks: float) -> None:
    """Notes how late the loop comes back to this coroutine, again and again.

    On a busy machine the time by the clock has in it what others computed. What the process itself computed
    leaves that out, and has in it other threads, which hold the interpreter or do not: so a stop by computing
    is as long as the shorter of the two, at most.
    """
    while True:
        if stacks:
            faulthandler.dump_traceback_later(stacks)  # by a thread of C, which needs no interpreter
        began, used = time.monotonic(), time.process_time()
        await asyncio.sleep(LOOK_SECONDS)
        late = time.monotonic() - began - LOOK_SECONDS
        clock.note(late, min(late, time.process_time() - used))


def main(pipes: Any) -> None:
    """Runs the API's process."""
    beat = api._beat

    async def watched(pipes: Any) -> None:
        clock = LoopClock(Path(os.environ["COSERVE_LOOP_CLOCK"]))
        watching = asyncio.create_task(watch(clock, float(os.environ.get("COSERVE_LOOP_STACKS", "0"))))
        try:
            await beat(pipes)
        finally:
            watching.cancel()

    api._beat = watched
    api.main(pipes)


@asynccontextmanager
async def watched_api(settings: ServerSettings, log: IO[bytes]) -> AsyncIterator[tuple[str, LoopClock]]:
    """The address of an API process, and its clock; `log` gets its stderr."""
    path = settings.state / "loop-clock"
    clock = LoopClock(path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tests = str(Path(__file__).parent)
        paths = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
        with forked():
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "coserve.wire.launch", "watched_api", stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=log, pass_fds=(listener.fileno(),),
                env={**os.environ, "COSERVE_LOOP_CLOCK": str(path), "PYTHONPATH": paths},
            )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(encode_line(ApiStart(settings, listener.fileno())).encode() + b"\n")
        talking = asyncio.create_task(_talk(process.stdin))
        try:
            while json.loads(await process.stdout.readline())["state"] != "ready":
                pass
            reading = asyncio.create_task(_read(process.stdout))
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", clock
            reading.cancel()
        finally:
            talking.cancel()
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _talk(stdin: asyncio.StreamWriter) -> None:
    """Says something twice a second, as a supervisor does."""
    while True:
        stdin.write(b"\n")
        await asyncio.sleep(0.5)


async def _read(stdout: asyncio.StreamReader) -> None:
    while await stdout.readline():
        pass
