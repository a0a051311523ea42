"""A child process as its supervisor sees it: orders in, status lines out, a log, an end."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from coserve.errors import ConfigError, ServerError
from coserve.wire.control import Status, decode_line

LONGEST_LINE = 2**20  # bytes
LARGEST_LOG = 16 * 2**20  # bytes; a longer one is put aside when a process starts


class Process:
    """One child. It is in a process group of its own: Ctrl-C in a terminal reaches the supervisor only.

    Not in a session of its own: Linux may share out time by sessions (autogroups), and then the low priority
    of an engine that is being imported would mean nothing beside the one that answers.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path, begin: int) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._log = log
        self._log_begin = begin

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], log: Path, pass_fds: Sequence[int] = ()
    ) -> "Process":
        """Starts a command; its stderr is appended to `log`. Raises ServerError if it cannot be run."""
        if log.exists() and log.stat().st_size > LARGEST_LOG:
            log.replace(log.with_suffix(".1.log"))
        with log.open("ab") as stderr:
            begin = stderr.tell()
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=stderr,
                    pass_fds=pass_fds,
                    process_group=0,
                    limit=LONGEST_LINE,
                )
            except OSError as error:
                raise ServerError(f"the {name} cannot be started: {error}") from error
        return cls(name, process, log, begin)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def tell(self, line: str) -> None:
        """Sends one line; a child that is gone does not hear it, and its end is seen elsewhere."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(line.encode() + b"\n")

    async def status(self) -> Status | None:
        """The next status line; None when there will be no more. Other output is passed over."""
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than any status
                continue
            if not line:
                return None
            with suppress(ConfigError):
                return decode_line(line, Status)

    async def wait(self) -> int:
        """The exit status; negative for the signal that ended it."""
        return await self._process.wait()

    def hurry(self) -> bool:
        """Gives each of its threads the priority that the supervisor has; False where that is not allowed.

        Only root, or who has been given a limit for it, may raise a priority that was lowered.
        """
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        with suppress(ProcessLookupError, FileNotFoundError):  # it is just ending: that is seen elsewhere
            for thread in os.listdir(f"/proc/{self.pid}/task") if sys.platform == "linux" else ():
                try:
                    os.setpriority(os.PRIO_PROCESS, int(thread), usual)
                except PermissionError:
                    return False
        return True

    def ask_to_end(self) -> None:
        if not self.has_ended:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Ends it and whatever it has started: they are one process group."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self, patience: float) -> int:
        """Asks it to end and kills it if that takes longer than `patience` seconds."""
        self.ask_to_end()
        try:
            return await asyncio.wait_for(self.wait(), patience)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def last_lines(self, count: int = 12) -> list[str]:
        """The end of what it wrote to its log."""
        with self._log.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(self._log_begin, size - 2**16))
            return log.read().decode(errors="replace").splitlines()[-count:]


def describe_end(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
