"""Python processes that begin with the imports done: forked from one that has made them, the zygote.

A start of an engine imports for six seconds, of an API for three; a fork takes less than a tenth. Within
`forked` a command `python -m MODULE` or `python -c CODE` of `subprocess` or `asyncio` is such a fork. For its
parent it is the process of any other command: a child with a status, its own standard streams, descriptors,
environment, folder and command line. What a forked process starts while it has one thread, and what a
supervisor starts, is forked from it. Outside of Linux, and
where the environment has other values of what libraries read at import, the command itself is started.
"""

import atexit
import ctypes
import gc
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Final

_PRELOADED: Final = (
    "coserve.engine.process", "coserve.serve.main", "coserve.worker.service", "coserve.split.service",
    "coserve.cli.app", "coserve.cli.serve", "coserve.serve.processes.supervisor", "openai",
    "transformers.models.llama.modeling_llama", "transformers.generation.utils", "forked_executors",
)  # fmt: skip
_READ_AT_IMPORT: Final = ("OMP_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "LD_", "PYTHONHASHSEED")
_CHILD_OF_SUPERVISOR: Final = ["-m", "coserve.wire.launch"]
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TITLE_BYTES: Final = 2000

_plain_fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]
_is_on: ContextVar[bool] = ContextVar("is_on", default=False)
_is_forked = False  # whether this process is


@contextmanager
def forked() -> Iterator[None]:
    """Has commands of this Python begin by a fork meanwhile."""
    before = _is_on.set(sys.platform == "linux")
    try:
        yield
    finally:
        _is_on.reset(before)


@dataclass(frozen=True)
class _Order:
    """The command of a new process, and the places that its descriptors get."""

    arguments: list[str]  # the first one is the interpreter
    environment: Mapping[str, str]
    folder: str
    places: list[int]

    @classmethod
    def read(
        cls, arguments: Sequence[str], environment: Sequence[bytes] | None, folder: Any, places: list[int]
    ) -> "_Order":
        pairs = (os.fsdecode(pair).partition("=") for pair in environment or ())
        names = dict(os.environ) if environment is None else {name: value for name, _, value in pairs}
        return cls([*map(os.fsdecode, arguments)], names, os.fsdecode(folder or os.getcwd()), places)

    def can_fork(self) -> bool:
        """Tells whether this is Python, and its libraries would be imported under the same environment."""
        own, theirs = (
            {name: value for name, value in names.items() if name.startswith(_READ_AT_IMPORT)}
            for names in (os.environ, self.environment)
        )
        return self.arguments[0] == sys.executable and self.arguments[1] in ("-c", "-m") and own == theirs


def _fork_exec(
    args: Sequence[str], executables: Any, close_fds: bool, kept: Sequence[int], folder: Any,
    environment: Any, stdin: int, p2cwrite: int, c2pread: int, stdout: int, errread: int, stderr: int,
    failure_read: int, failure: int, restores: bool, new_session: bool, group: int, *more: Any,
) -> int:  # fmt: skip
    """Stands in for `subprocess._fork_exec`; -1 stands for a stream of this process."""
    if _is_on.get() or _is_forked:
        passed = [number for number in kept if number != failure]
        order = _Order.read(args, environment, folder, [0, 1, 2, *passed])
        streams = [place if given == -1 else given for place, given in enumerate((stdin, stdout, stderr))]
        if order.can_fork() and _is_on.get():
            return _ZYGOTE.fork(order, [*streams, *passed])
        # With one thread a fork is safe. A supervisor's further ones wait for the ends of its children.
        is_safe = len(os.listdir("/proc/self/task")) == 1 or order.arguments[1:3] == _CHILD_OF_SUPERVISOR
        if order.can_fork() and is_safe:
            sys.stdout.flush()
            if pid := os.fork():
                return pid
            if new_session:
                os.setsid()
            elif group != -1:
                os.setpgid(0, group)
            _become(order, [*streams, *passed])
    plain = _plain_fork_exec(
        args, executables, close_fds, kept, folder, environment, stdin, p2cwrite, c2pread, stdout, errread,
        stderr, failure_read, failure, restores, new_session, group, *more,
    )  # fmt: skip
    return int(plain)


subprocess._fork_exec = _fork_exec  # type: ignore[attr-defined]


class _Zygote:
    """This process's end of its zygote, which is started when the first fork is wanted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def fork(self, order: _Order, descriptors: Sequence[int]) -> int:
        """A new child of this process."""
        with self._lock:
            if self._socket is None:
                self._socket = Context().run(self._start)  # where `forked` does not hold
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the child's parents end at once, and it becomes ours
            try:
                body = pickle.dumps(order)
                socket.send_fds(self._socket, [len(body).to_bytes(8, "big")], descriptors)
                self._socket.sendall(body)
                return int.from_bytes(_received(self._socket, 8), "big")
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    @staticmethod
    def _start() -> socket.socket:
        ours, theirs = socket.socketpair()
        code = f"import forking; forking.run_zygote({theirs.fileno()}, {_PRELOADED})"
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        # In a session of its own: an interrupt at the terminal is for the tests. Its end is the socket's.
        subprocess.Popen(
            [sys.executable, "-c", code, "x" * _TITLE_BYTES], pass_fds=[theirs.fileno()], env=paths,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        return ours


_ZYGOTE = _Zygote()


def run_zygote(number: int, preloaded: Sequence[str]) -> None:
    """Imports, and forks a process for each order that comes through the socket."""
    gc.disable()
    for name in preloaded:
        import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a library has started a thread"
    gc.collect()
    gc.freeze()
    gc.enable()
    orders, tests = socket.socket(fileno=number), os.getppid()
    while True:
        head, descriptors, _, _ = socket.recv_fds(orders, 8, 250)
        if not head:
            return
        order = pickle.loads(_received(orders, int.from_bytes(head, "big")))
        told, tells = os.pipe()
        if not (between := os.fork()):
            between = os.getpid()
            if pid := os.fork():
                os.write(tells, pid.to_bytes(8, "big"))
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0002)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no orphan is left by tests that are killed
            if os.getppid() != tests:  # they were killed before
                os._exit(0)
            os.setsid()
            _become(order, descriptors)
        os.waitpid(between, 0)
        orders.sendall(os.read(told, 8))
        for descriptor in (told, tells, *descriptors):
            os.close(descriptor)


def _become(order: _Order, descriptors: Sequence[int]) -> None:
    """Turns a process that was just forked into the one ordered, runs that, and exits."""
    global _is_forked
    _is_forked = True
    _is_on.set(False)
    gc.freeze()  # the parent's sockets and files must not be closed by a collection: others get their numbers
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.detach()
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for known in signal.valid_signals():
        if callable(signal.getsignal(known)) and known != signal.SIGINT:
            signal.signal(known, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _place(descriptors, order.places)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    _set_title(" ".join(order.arguments))
    status = 1
    try:
        _run(order.arguments[1], order.arguments[2], order.arguments[3:])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)


def _run(option: str, what: str, arguments: list[str]) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = ["", *(path for path in paths if path not in sys.path)]
    sys.argv, sys.orig_argv = [option, *arguments], [sys.executable, option, what, *arguments]
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    for path in paths:
        if os.path.exists(custom := os.path.join(path, "sitecustomize.py")):
            runpy.run_path(custom)
    if option == "-c":
        exec(compile(what, "<string>", "exec"), vars(main))
    else:
        warnings.filterwarnings("ignore", module="runpy")  # that the module has been imported before
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]


def _place(descriptors: Sequence[int], places: Sequence[int]) -> None:
    """Moves descriptors to their places, and closes all others."""
    beyond = max(*places, *descriptors) + 1
    high = [os.dup2(given, beyond + n) for n, given in enumerate(descriptors)]
    for given, place in zip(high, places, strict=True):
        os.dup2(given, place)
    first = 0
    for place in [*sorted(places), os.sysconf("SC_OPEN_MAX")]:
        if first < place:  # an empty range up to 0 closes all
            os.closerange(first, place)
        first = place + 1


def _set_title(title: str) -> None:
    """Writes the command line that others see over the interpreter's, up to its length. A last byte that is
    not zero tells Linux that the text ends at the first zero."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, size = int(fields[45]), int(fields[46]) - int(fields[45])
    text = os.fsencode(title)[: size - 2]
    ctypes.memset(begin, 0, size)
    ctypes.memmove(begin, text, len(text))
    ctypes.memset(begin + size - 1, ord("."), 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _received(stream: socket.socket, size: int) -> bytes:
    body = b""
    while len(body) < size:
        part = stream.recv(size - len(body))
        assert part, "the process that others are forked from has ended"
        body += part
    return body
