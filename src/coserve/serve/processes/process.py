"""Child processes of the supervisor: start lines in, status lines out, logs, exits."""

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
LARGEST_LOG = 16 * 2**20  # bytes; a larger one is renamed when a process starts
_OWN_SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
LAST_WORDS = 1.0  # seconds for a hanging child to write its threads' stacks to its log


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """End of a child: its exit status, negative for a signal. `why` is the child's own reason, or the
    supervisor's if it ended the child as hanging (`was_hanging`). `was_stopped` tells whether it was stopped
    (SIGSTOP) before."""

    code: int
    why: str = ""
    was_hanging: bool = False
    was_stopped: bool = False

    def __str__(self) -> str:
        """The reason of the end in words: the child's own, the supervisor's, or the exit status."""
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
        """Cause, in words, of an end by the process itself: an exception, a memory fault, or a hanging loop.
        Empty where it was ended from outside: drained, killed, or stopped by a signal."""
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
    """One child, in a process group of its own: Ctrl-C in a terminal reaches the supervisor only.

    It has no session of its own: Linux may share out time by sessions (autogroups), and then the low priority
    of an importing engine would have no effect on the answering one.

    `heard` is the time of its last message, on `time.monotonic`; `beats_itself` whether its own loop sends
    heartbeats, not the thread that does so while it starts. `is_doomed` is set when it is ended as hanging.
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
        self._told = False  # whether its start line was sent, which must be its first
        self._has_group = True  # which may outlive it
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
        """Sends one line. A child that has ended does not receive it; `wait` reports its end."""
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
        """The next status except heartbeats; None when there will be no more."""
        status = await self._said.get()
        if status is None:
            self._said.put_nowait(None)
        return status

    async def _listen(self) -> None:
        """Reads the child's lines. Lines other than statuses are ignored."""
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than `LONGEST_LINE`
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
        """Deducts `seconds` from its silence."""
        self.heard = min(self.heard + seconds, now)
        if self._stopped_since is not None:
            self._stopped_since = min(self._stopped_since + seconds, now)

    def stopped_since(self, now: float) -> float | None:
        """Time at which the process was first seen stopped (SIGSTOP); None while it runs. It is always None
        on systems without reports of stops (macOS), where only the silence shows."""
        if hasattr(os, "waitid") and not self.has_ended:
            with suppress(ChildProcessError):
                changes = os.WSTOPPED | os.WCONTINUED | os.WNOHANG  # its exit is left to asyncio
                while (found := os.waitid(os.P_PID, self.pid, changes)) is not None:
                    self._stopped_since = now if found.si_code == os.CLD_STOPPED else None
        return self._stopped_since

    async def wait(self) -> ProcessEnd:
        """Waits for its end; all its messages have been read then."""
        code = await self._process.wait()
        self._end_group()
        with suppress(TimeoutError):  # a child of its own may hold the pipe open
            await asyncio.wait_for(asyncio.shield(self._listening), LAST_WORDS)
        return ProcessEnd(code, self._why, self.is_doomed, self._stopped_since is not None)

    def hurry(self) -> bool:
        """Gives each of its threads the supervisor's priority; False where that is not allowed.

        Only root, or a user with a limit for it, may raise a lowered priority.
        """
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        with suppress(ProcessLookupError, FileNotFoundError):  # it is ending: `wait` reports that
            for thread in os.listdir(f"/proc/{self.pid}/task") if sys.platform == "linux" else ():
                try:
                    os.setpriority(os.PRIO_PROCESS, int(thread), usual)
                except PermissionError:
                    return False
        return True

    def kill(self) -> None:
        """Kills its process group: the child and all its children."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _end_group(self) -> None:
        """Kills, once, what is left of its process group: a rank that is stopped does not end with it."""
        if self._has_group:
            self._has_group = False
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def abort(self, why: str) -> None:
        """Ends a hanging child, which writes the stacks of its threads to its log if it still can."""
        self._why, self.is_doomed = why, True
        for number in (signal.SIGABRT, signal.SIGCONT):  # a stopped child gets the first after the second
            if not self.has_ended:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), LAST_WORDS)
        self.kill()

    async def end(self, patience: float) -> ProcessEnd:
        """Ends the child with SIGTERM, and kills it after `patience` seconds."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                self._process.terminate()
        try:
            return await asyncio.wait_for(self.wait(), patience)
        except TimeoutError:
            self.kill()
            return await self.wait()
