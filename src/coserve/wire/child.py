"""A child's end of the pipes to its supervisor."""

import os
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, TypeVar

from coserve.wire.control import Status, decode_line, encode_line

T = TypeVar("T")
ORPHANED = 3  # exit status


class Supervised:
    """The pipes of a child process: its orders in, its status out.

    Take it before anything else writes to stdout: from then on what is printed goes to stderr, so that no
    library can break the status lines.
    """

    def __init__(self) -> None:
        self._in = os.fdopen(os.dup(0), "rb", buffering=0)
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # nor may a process that a library starts hold our stdin open
        os.close(nothing)
        self._lock = threading.Lock()

    def start_line(self, kind: type[T]) -> T:
        """Waits for the line that says what to do; the process ends quietly if none comes.

        Raises ConfigError on a malformed one.
        """
        line = _read_line(self._in)
        if not line:
            sys.exit(0)
        return decode_line(line, kind)

    def say(self, status: Status) -> None:
        """Tells the supervisor; nobody listening is no error."""
        with self._lock:
            try:
                self._out.write(encode_line(status).encode() + b"\n")
            except BrokenPipeError:
                return

    def end_with_supervisor(self, end: Callable[[], object] | None = None) -> None:
        """From now on the process ends when stdin does, whatever its other threads are doing.

        `end` is called first, in a thread of its own; it must be quick (remove a socket).
        """
        threading.Thread(target=self._watch, args=(end,), name="supervisor-watch", daemon=True).start()

    def _watch(self, end: Callable[[], object] | None) -> None:
        while self._in.read(4096):
            pass
        try:
            if end is not None:
                end()
        finally:
            os._exit(ORPHANED)  # sys.exit would end this thread only, and wait for the others


def _read_line(stream: BinaryIO) -> bytes:
    """One line, byte by byte: what follows belongs to the watch."""
    line = bytearray()
    while byte := stream.read(1):
        if byte == b"\n":
            break
        line += byte
    return bytes(line)
