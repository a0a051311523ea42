"""Child processes of the supervisor: start lines in, status lines out, a log, an end."""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coserve.errors import ConfigError, ServerError
from coserve.wire.control import Status, decode_line

LONGEST_LINE = 2**20  # bytes
LARGEST_LOG = 16 * 2**20  # bytes; a longer one is put aside when a process starts
_OWN_SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
LAST_WORDS = 1.0  # seconds that one that hangs has to write the stacks of its threads into its log


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a child ended: its exit status, negative for the signal that ended it; `why` is what it said of its
    end, or why the supervisor ended it, as `was_hanging` tells. It may have been stopped (SIGSTOP) before."""

    code: int
    why: str = ""
    was_hanging: bool = False
    was_stopped: bool = False

    def __str__(self) -> str:
        """In words: its own or the supervisor's, or what its exit status says."""
        if self.why:
            return self.why
        if self.code >= 0:
            return f"exit status {self.code}"
        if self.code == -signal.SIGKILL:
            return "killed by SIGKILL, as the system does where memory runs out"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"

    @property
    def crash(self) -> str:
        """Cause, in words, of an end that the process itself brought about: an exception, a memory fault, or
        a hanging loop. Empty where it was ended from outside: drained, killed, or stopped by a signal."""
        is_own = self.was_hanging or self.code == 1 or -self.code in _OWN_SIGNALS
        return str(self) if is_own and not self.was_stopped else ""


@dataclass(frozen=True, slots=True)
class ChildLog:
    """The file that a child's stderr is appended to, from byte `begin` on."""

    path: Path
    begin: int

    def __str__(self) -> str:
        return str(self.path)

    def last_lines(self, count: int = 12) -> list[str]:
        """The last lines that the child wrote."""
        with self.path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(self.begin, size - 2**16))
            return log.read().decode(errors="replace").splitlines()[-count:]


class ChildProcess:
    """One child. It is in a process group of its own: Ctrl-C in a terminal reaches the supervisor only.

    Not in a session of its own: Linux may share out time by sessions (autogroups), and then the low priority
    of an engine that is being imported would mean nothing beside the one that answers.

    `heard` is when it last said anything, on `time.monotonic`; `beats_itself` whether its own loop says it,
    rather than the thread that speaks for it while it starts. One that hangs `is_doomed` once it is to end.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: ChildLog) -> None:
        self.name = name
        self.pid = process.pid
        self.log = log
        self.heard = time.monotonic()
        self.beats_itself = False
        self.is_doomed = False
        self._why = ""
        self._process = process
        self._told = False  # the line that says what it has to do, before which it must not hear another
        self._stopped_since: float | None = None
        self._said: asyncio.Queue[Status | None] = asyncio.Queue()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], log: Path, pass_fds: Sequence[int] = ()
    ) -> "ChildProcess":
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
        return cls(name, process, ChildLog(log, begin))

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def tell(self, line: str) -> None:
        """Sends one line; a child that is gone does not hear it, and its end is seen elsewhere."""
        assert self._process.stdin is not None
        self._told = True
        if not self._process.stdin.is_closing():
            self._process.stdin.write(line.encode() + b"\n")

    def greet(self) -> None:
        """Sends a sign of life; a child that does not read its input misses it."""
        assert self._process.stdin is not None
        if self._told and not self._process.stdin.transport.get_write_buffer_size():
            self.tell("")

    async def status(self) -> Status | None:
        """The next status line but for heartbeats; None when there will be no more."""
        status = await self._said.get()
        if status is None:
            self._said.put_nowait(None)
        return status

    async def _listen(self) -> None:
        """Takes in the child's lines. Lines that are no status are passed over."""
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than any status
                continue
            if not line:
                break
            with suppress(ConfigError):
                self._hear(decode_line(line, Status))
        self._said.put_nowait(None)

    def _hear(self, status: Status) -> None:
        self.heard = time.monotonic()
        if status.state == "alive":
            return
        if status.state in ("failed", "crashed"):
            self._why = status.text
        self.beats_itself = self.beats_itself or status.state == "ready"
        self._said.put_nowait(status)

    def excuse(self, seconds: float, now: float) -> None:
        """Does not count so many seconds as silence."""
        self.heard = min(self.heard + seconds, now)
        if self._stopped_since is not None:
            self._stopped_since = min(self._stopped_since + seconds, now)

    def stopped_since(self, now: float) -> float | None:
        """Time at which the process was first seen stopped (SIGSTOP); None while it runs. On systems that do
        not report stops (macOS) it is always None, and the process's silence tells."""
        if hasattr(os, "waitid") and not self.has_ended:
            with suppress(ChildProcessError):
                changes = os.WSTOPPED | os.WCONTINUED | os.WNOHANG  # not its end: asyncio waits for that
                while (found := os.waitid(os.P_PID, self.pid, changes)) is not None:
                    self._stopped_since = now if found.si_code == os.CLD_STOPPED else None
        return self._stopped_since

    async def wait(self) -> ProcessEnd:
        """Its end. All that it said has been taken in."""
        code = await self._process.wait()
        with suppress(TimeoutError):  # a process that it started may hold the pipe open
            await asyncio.wait_for(asyncio.shield(self._listening), LAST_WORDS)
        return ProcessEnd(code, self._why, self.is_doomed, self._stopped_since is not None)

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

    def kill(self) -> None:
        """Ends it and whatever it has started: they are one process group."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def abort(self, why: str) -> None:
        """Ends one that hangs: it leaves the stacks of its threads in its log if it still can."""
        self._why, self.is_doomed = why, True
        for number in (signal.SIGABRT, signal.SIGCONT):  # one that is stopped hears the first after the other
            if not self.has_ended:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), LAST_WORDS)
        self.kill()

    async def end(self, patience: float) -> ProcessEnd:
        """Asks it to end and kills it if that takes longer than `patience` seconds."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                self._process.terminate()
        try:
            return await asyncio.wait_for(self.wait(), patience)
        except TimeoutError:
            self.kill()
            return await self.wait()
