"""The child of a sandbox: `python -m coserve.sandbox.child MODULE:FUNCTION BYTES`.

Reads calls from stdin and writes replies to the pipe that was stdout. The process may have BYTES of address
space beyond what it has once the module is imported, and each call its seconds of processor time, after which
the kernel ends the process. It writes no file and no core. It ends at the end of stdin.
"""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, BinaryIO, Final

import msgspec

from coserve.errors import CoserveError
from coserve.sandbox.frames import ERROR, ITEM, MEMORY_ENDED, RESULT, Returned, frame, length_of

_LONGEST_TEXT: Final = 2000  # characters of an error


def limit_memory(extra: int) -> None:
    """Bounds this process to its present address space and `extra` bytes, for the rest of its life."""
    with open("/proc/self/statm", "rb") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + extra, present + extra))


def serve(function: Any, calls: BinaryIO, replies: int) -> None:
    """Answers calls until their pipe ends."""
    while (header := calls.read(4)) and len(header) == 4:
        seconds, *arguments = msgspec.msgpack.decode(calls.read(length_of(header) or 0))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        for reply in _replies(function, arguments):
            _write(replies, frame(reply))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _replies(function: Any, arguments: list[Any]) -> Iterator[Returned]:
    try:
        result = function(*arguments)
        if isinstance(result, Iterator):
            for item in result:
                yield Returned(ITEM, item)
            result = None
        yield Returned(RESULT, result)
    except MemoryError:
        os._exit(MEMORY_ENDED)
    except CoserveError as error:
        yield Returned(ERROR, (type(error).__name__, str(error)[:_LONGEST_TEXT]))
    except BaseException as error:  # panics of Rust libraries are no Exception
        text = str(error).encode(errors="replace").decode()
        yield Returned(ERROR, (type(error).__name__, text[:_LONGEST_TEXT]))


def _write(replies: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(replies, left) :]


def main() -> None:
    """Imports the function, then answers calls."""
    target, memory = sys.argv[1:]
    calls, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(2, 1)  # no library may write between replies
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module, _, name = target.partition(":")
    function = getattr(import_module(module), name)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # importing torch tries whether a file can be written
    limit_memory(int(memory))
    _write(replies, frame(Returned(RESULT)))
    serve(function, calls, replies)


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        os._exit(MEMORY_ENDED)
    except BrokenPipeError:
        os._exit(0)  # the parent is gone
    os._exit(0)  # a regular exit would run what libraries leave behind
