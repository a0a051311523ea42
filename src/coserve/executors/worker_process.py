"""The host's end of one worker's process: its sockets, and how it has ended."""

import queue
import select
import signal
import socket
import subprocess
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from coserve.errors import EngineLost
from coserve.executors.channel import ASKED, ENDED, NUMBER, WAITS
from coserve.wire.frames import FrameReader, send_frame

_BESIDE: Final = 4  # concurrent calls beside steps; more wait
_ENDING: Final = 5.0  # seconds for the process to end by itself
_ANSWER: Final = 1.0  # seconds for a process to say whether it waits
QUIET: Final = 0.25  # seconds between checks for heartbeats
# Of a process that has failed by itself. Others come from outside, as SIGKILL where the system lacks memory.
_OWN_SIGNALS: Final = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)

Start = Callable[[Sequence[int]], "subprocess.Popen[bytes]"]  # of a process that serves these descriptors


class WorkerProcess:
    """A process that serves a worker. What fails because it is gone raises EngineLost, which calls it
    `name`."""

    def __init__(self, start: Start, name: str = "the executor's process") -> None:
        pairs = [socket.socketpair() for _ in range(2 + _BESIDE)]
        theirs = [other for _, other in pairs]
        self.name = name
        self.failed: tuple[float, str, bool] | None = None  # when, why, and whether work is to blame
        self.process = start([sock.fileno() for sock in theirs])
        for sock in theirs:
            sock.close()
        self.steps, self.signals, *beside = (own for own, _ in pairs)
        self._close = weakref.finalize(self, _end, self.process, [own for own, _ in pairs])
        self._beside: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for sock in beside:
            self._beside.put(sock)
        self._messages = FrameReader(self.steps, patience=QUIET)
        self._poll = select.poll()
        self._poll.register(self.steps, select.POLLIN)

    def send(self, message: bytes) -> None:
        """Sends a message on the steps' socket."""
        with self._lost():
            send_frame(self.steps, message)

    def read(self) -> bytes:
        """Waits for the next message on the steps' socket. Raises TimeoutError after `QUIET` seconds; the
        next call continues."""
        with self._lost():
            message = self._messages.read()
        if message is None:
            raise self.gone()
        if message[:1] == ENDED:
            self.failed = msgspec.msgpack.decode(message[1:], type=tuple[float, str, bool])
            raise EngineLost(f"{self.name} has failed: {self.failed[1]}", self.failed[2])
        return message

    def listen(self) -> None:
        """Reads why the process has failed, if it has."""
        with suppress(EngineLost, TimeoutError):
            while self.failed is None:
                self.read()

    def hangs(self) -> bool:
        """Tells whether a rank may be what the others wait for: it does not say that it waits for them. One
        that has ended does not hang."""
        try:
            self.signs()
            self.signals.sendall(NUMBER.pack(ASKED))
            select.select([self.signals], [], [], _ANSWER)
            answer = self.signals.recv(4096, socket.MSG_DONTWAIT)
            return bool(answer) and WAITS not in answer
        except BlockingIOError:
            return True
        except OSError:
            return False

    def is_there(self) -> bool:
        """Tells whether something has come that was not read."""
        return self._messages.has_begun or bool(self._poll.poll(0))

    @contextmanager
    def beside(self) -> Iterator[socket.socket]:
        """A socket for one command beside steps."""
        sock = self._beside.get()
        try:
            with self._lost():
                yield sock
        finally:
            self._beside.put(sock)

    def answer(self, sock: socket.socket) -> bytes:
        """Waits for the reply to a command that was sent on a socket of `beside`."""
        reply = FrameReader(sock).read()
        if reply is None:
            raise self.gone()
        return reply

    def pause(self, number: int) -> None:
        """Tells of a pause."""
        with self._lost():
            self.signals.sendall(NUMBER.pack(number))

    def signs(self) -> bool:
        """Tells whether a heartbeat of the process has come since the last call."""
        try:
            return bool(self.signals.recv(4096, socket.MSG_DONTWAIT))
        except OSError:
            return False

    def close(self) -> None:
        """Ends the process."""
        self._close()

    def gone(self) -> EngineLost:
        """The error that says how the process has ended."""
        try:
            status = self.process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            return EngineLost(f"{self.name} closed its sockets")
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return EngineLost(f"{self.name} has ended ({how})", status >= 0 or -status in _OWN_SIGNALS)

    @contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise
        except OSError as error:
            raise self.gone() from error


def wait_for_any(workers: Sequence[WorkerProcess]) -> list[WorkerProcess]:
    """Waits up to `QUIET` seconds for a message of any of several; returns those of which something has come,
    an end too."""
    ready, _, _ = select.select([worker.steps for worker in workers], [], [], QUIET)
    return [worker for worker in workers if worker.steps in ready]


def _end(process: "subprocess.Popen[bytes]", sockets: Sequence[socket.socket]) -> None:
    """Closes the sockets, which ends the process; a process that does not end is killed."""
    for sock in sockets:
        sock.close()
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
