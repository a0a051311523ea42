"""A child's end of the pipes to its supervisor: start line in, status lines and heartbeats out."""

import logging
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, TypeVar

from coserve.core.masking import masked
from coserve.wire.control import BEAT_SECONDS, Status, decode_line, encode_line

_log = logging.getLogger(__name__)
T = TypeVar("T")
ORPHANED: Final = 3  # exit status
SILENT_SECONDS: Final = (
    4.0  # after which a supervisor, which says something twice a second, hangs or is stopped
)
_ALIVE: Final = encode_line(Status("alive")).encode() + b"\n"
_PATIENCE: Final = 5.0  # seconds that a status line waits for room in the pipe
_LONGEST: Final = 500  # characters of an exception in a status line


class SupervisorPipes:
    """The pipes of a child process.

    Create it before anything writes to stdout: printed output then goes to stderr, so that no library can
    break the status lines.

    A thread ends the process at the end of stdin, when the supervisor is gone. Until the child's status is
    `ready` this thread also sends heartbeats, as the start waits for disks and networks. From then on the
    child's own loop calls `beat`, so that a hanging loop is silent.
    """

    def __init__(self) -> None:
        self._in = os.fdopen(os.dup(0), "rb", buffering=0)
        self._out = os.dup(1)
        os.set_blocking(self._out, False)  # a supervisor that is stopped must not stop its children
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # nor may a process that a library starts hold our stdin open
        os.close(nothing)
        self._lock = threading.Lock()
        self._beaten = 0.0
        self._heard = time.monotonic()
        self._starting = True
        self._ordered = threading.Event()  # the start line has been read
        self.early: list[bytes] = []  # lines after it that came before `on_line` was set
        self.on_line: Callable[[bytes], object] = self.early.append
        threading.Thread(target=self._watch, name="supervisor-watch", daemon=True).start()

    @property
    def supervisor_silence(self) -> float:
        """Seconds since the supervisor's last line; it sends one twice a second."""
        return time.monotonic() - self._heard

    def start_line(self, kind: type[T]) -> T:
        """Waits for the start line; the process exits if stdin ends first.

        Raises ConfigError on a malformed one.
        """
        line = _read_line(self._in)
        if not line:
            sys.exit(0)
        self._ordered.set()
        return decode_line(line, kind)

    def say(self, status: Status) -> None:
        """Sends a status to the supervisor; ignored if the supervisor does not read."""
        if status.state in ("ready", "draining", "drained"):
            self._starting = False
        with self._lock:
            self._write(encode_line(status).encode() + b"\n")

    def beat(self) -> None:
        """Sends a heartbeat at most twice a second; other calls take 0.1 us.

        Dropped if the pipe is full.
        """
        now = time.monotonic()
        if now - self._beaten < BEAT_SECONDS:
            return
        self._beaten = now
        if self._lock.acquire(blocking=False):  # else a line is being written, which tells as much
            try:
                os.write(self._out, _ALIVE)  # shorter than PIPE_BUF: all of it or nothing
            except OSError:
                pass
            finally:
                self._lock.release()

    def own_crashes(self) -> None:
        """Installs a hook: an uncaught exception is reported to the supervisor, its traceback goes to stderr,
        and the process exits at once with status 1."""
        sys.excepthook = self._crash

    def _crash(
        self, kind: type[BaseException], error: BaseException | None, where: TracebackType | None
    ) -> None:
        if logging.getLogger().handlers and error is not None:
            _log.critical("the process ends", exc_info=(kind, error, where))
        else:
            traceback.print_exception(kind, error, where)
        sys.stderr.flush()
        self.say(Status("crashed", describe_exception(kind, error, where), kind=kind.__name__))
        os._exit(1)

    def _write(self, line: bytes) -> None:
        end = time.monotonic() + _PATIENCE
        room = select.poll()
        room.register(self._out, select.POLLOUT)
        while line and (left := end - time.monotonic()) > 0:
            try:
                line = line[os.write(self._out, line) :]
            except BlockingIOError:
                room.poll(1000 * left)
            except OSError:
                return

    def _watch(self) -> None:
        pipe, line = select.poll(), b""
        while True:
            ordered = self._ordered.is_set()
            pipe.register(self._in, select.POLLIN if ordered else 0)  # not ordered: hang-ups only
            events = pipe.poll(1000 * BEAT_SECONDS)
            if self._starting:
                self.beat()
            if ordered and events:
                if not (data := self._in.read(4096)):
                    break
                self._heard = time.monotonic()
                *whole, line = (line + data).split(b"\n")
                for one in filter(None, whole):
                    self.on_line(one)
            elif any(event & select.POLLHUP for _, event in events):
                break
        os._exit(ORPHANED)  # sys.exit would end this thread only, and wait for the others


def describe_exception(
    kind: type[BaseException], error: BaseException | None, where: TracebackType | None
) -> str:
    """An exception in one line: its kind, the first line of its message, and where it was raised."""
    said = masked(next(iter(str(error).strip().splitlines()), ""))[:_LONGEST]
    frames = traceback.extract_tb(where)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{kind.__name__}: {said}{place}" if said else f"{kind.__name__}{place}"


def _read_line(stream: BinaryIO) -> bytes:
    """Reads one line byte by byte, leaving further input to the watching thread."""
    line = bytearray()
    while byte := stream.read(1):
        if byte == b"\n":
            break
        line += byte
    return bytes(line)
