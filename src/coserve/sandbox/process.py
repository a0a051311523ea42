"""One sandbox: a child process that calls one function on foreign data, with limits.

Templates, regular expressions, columnar files and tokenizers are programs: a small one may run for hours,
take all memory, or end its process, mostly in C code that holds the interpreter's lock. In a sandbox it ends
alone. The function is coserve's own and is named when the sandbox is made; arguments and results are values
that msgpack has. The kernel enforces the limits, so they hold in C code, and for a child whose parent died.

    sandbox = Sandbox("coserve.text.rendering:render", memory=512 << 20)
    text = sandbox.call(template, turns, seconds=2.0)
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from select import POLLIN, POLLOUT, poll
from typing import Any, Final

import msgspec

from coserve import errors
from coserve.errors import CoserveError, InternalError, LimitExceeded
from coserve.sandbox.frames import ERROR, ITEM, MEMORY_ENDED, RESULT, Returned, frame, length_of

MOST_REPLY: Final = 64 * 2**20  # bytes of one result or item
_START_SECONDS: Final = 60.0  # until the child has imported its function; 0.1 to 3 s on an idle machine
# A call that sleeps uses no processor time, and a loaded machine gives it little.
_WALL_FACTOR: Final = 10.0
_WALL_LEAST: Final = 10.0
# Only the paths of libraries: the environment may hold keys, and a parser may have a hole.
_KEPT: Final = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "LANG", "TMPDIR")
_ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # the others reserve address space in advance
}


class Sandbox:
    """A child process that calls `target` ("module:function"), started at its first call and again after one
    that ended it. Calls are made by one thread at a time; `kill` may come from any.

    The child may have `memory` bytes of address space beyond what importing the module takes. Of the
    environment it keeps paths of libraries and the variables in `keep`.
    """

    def __init__(self, target: str, memory: int, keep: tuple[str, ...] = ()) -> None:
        self._target, self._memory, self._keep = target, memory, keep
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()
        self._killed = False
        self._lock = threading.Lock()  # held while `_child` and `_killed` change

    def call(self, *arguments: Any, seconds: float) -> Any:
        """Returns the function's result. `seconds` is processor time; waiting may take ten times as long.

        Raises the errors of `coserve.errors` that the function raises; LimitExceeded where it exceeds a limit
        or ends its process; InternalError for any other exception.
        """
        replies = self._replies(arguments, seconds)
        try:
            for kind, value in replies:
                if kind == RESULT:
                    return value
        finally:
            replies.close()
        raise InternalError(f"{self._target} gave items where a result was expected")

    def stream(self, *arguments: Any, seconds: float) -> Iterator[Any]:
        """Yields the items of an iterator that the function returns. `seconds` is for all of them together;
        raises what `call` does. Closing the iterator early ends the child."""
        replies = self._replies(arguments, seconds)
        try:
            for kind, value in replies:
                if kind == ITEM:
                    yield value
        finally:
            replies.close()

    @property
    def is_killed(self) -> bool:
        """Tells whether it was ended for good."""
        return self._killed

    def kill(self) -> None:
        """Ends the child at once, and for good; a call under way raises LimitExceeded."""
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()

    def close(self) -> None:
        """Ends the child and waits for it. No call may be under way."""
        self.kill()
        self._end()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _replies(self, arguments: tuple[Any, ...], seconds: float) -> Generator[tuple[int, Any], None, None]:
        """Replies of one call, up to and with its result."""
        is_whole = False
        try:
            child = self._started()
            until = time.monotonic() + _WALL_LEAST + _WALL_FACTOR * seconds
            self._send(child, frame((seconds, *arguments)), until, seconds)
            while True:
                reply = self._receive(child, until, seconds)
                if reply.kind == ERROR:
                    is_whole = True
                    raise _error_of(reply)
                if reply.kind == RESULT:
                    is_whole = True
                given = time.monotonic()
                yield reply.kind, reply.value
                if is_whole:
                    return
                until += time.monotonic() - given  # the caller's time is not the child's
        finally:
            if not is_whole:
                self._end()

    def _started(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._killed:
                raise LimitExceeded("the work was ended")
            if self._child is not None and self._child.poll() is None:
                return self._child
            self._buffer.clear()
            environment = {key: os.environ[key] for key in (*_KEPT, *self._keep) if key in os.environ}
            environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_ONE_THREAD}
            # -P: a module beside the working directory is not ours.
            command = [sys.executable, "-P", "-m", "coserve.sandbox.child", self._target, str(self._memory)]
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                bufsize=0,
            )
            assert self._child.stdin is not None
            os.set_blocking(self._child.stdin.fileno(), False)
            child = self._child
        ready = self._receive(child, time.monotonic() + _START_SECONDS, _START_SECONDS)
        if ready.kind == ERROR:
            raise _error_of(ready)
        return child

    def _send(self, child: "subprocess.Popen[bytes]", data: bytes, until: float, seconds: float) -> None:
        assert child.stdin is not None
        room = poll()
        room.register(child.stdin, POLLOUT)
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(child.stdin.fileno(), left) :]
            except BlockingIOError:
                if (rest := until - time.monotonic()) <= 0:
                    raise LimitExceeded(_too_long(seconds)) from None
                room.poll(1000 * rest)
            except OSError:
                raise self._ended(child, seconds) from None

    def _receive(self, child: "subprocess.Popen[bytes]", until: float, seconds: float) -> Returned:
        assert child.stdout is not None
        there = poll()
        there.register(child.stdout, POLLIN)
        wanted = None
        while True:
            if wanted is None and (wanted := length_of(self._buffer)) is not None and wanted > MOST_REPLY:
                raise LimitExceeded(f"the result has {wanted} bytes; at most {MOST_REPLY} are taken")
            if wanted is not None and len(self._buffer) >= 4 + wanted:
                reply = msgspec.msgpack.decode(memoryview(self._buffer)[4 : 4 + wanted], type=Returned)
                del self._buffer[: 4 + wanted]
                return reply
            if not there.poll(1000 * max(0.0, until - time.monotonic())):
                raise LimitExceeded(_too_long(seconds))
            if not (part := os.read(child.stdout.fileno(), 2**18)):
                raise self._ended(child, seconds)
            self._buffer += part

    def _ended(self, child: "subprocess.Popen[bytes]", seconds: float) -> CoserveError:
        """The error for a child that closed its pipe."""
        try:
            status = child.wait(_WALL_LEAST)
        except subprocess.TimeoutExpired:
            return LimitExceeded(_too_long(seconds))
        if self._killed:
            return LimitExceeded("the work was ended")
        if status == MEMORY_ENDED:
            return LimitExceeded(f"it takes more than {self._memory // 2**20} MiB")
        if status == -signal.SIGPROF:  # of the call's timer
            return LimitExceeded(_too_long(seconds))
        ended = f"signal {-status}" if status < 0 else f"status {status}"
        return LimitExceeded(f"its process ended with {ended}")

    def _end(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()
        child.wait()


def _too_long(seconds: float) -> str:
    return f"it takes more than {seconds:.3g} s"


def _error_of(reply: Returned) -> CoserveError:
    """The error that a child told: of its own class where that is one of `coserve.errors`."""
    name, text = reply.value
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, CoserveError):
        return kind(text)
    return InternalError(f"{name}: {text}")
