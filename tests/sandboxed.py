"""Functions for sandboxes in tests: each is something that foreign data might make of a library."""

import os
import re
import time
from collections.abc import Iterator
from typing import Any

from coserve.errors import DataError

_calls = 0


def echo(value: Any) -> Any:
    return value


def counted() -> int:
    """Calls of this process so far."""
    global _calls
    _calls += 1
    return _calls


def act(what: str, number: int = 0) -> Any:
    """Does one of the things that a sandbox has to bear."""
    if what == "echo":
        return number
    if what == "items":
        return items(number)
    if what == "backtrack":  # in C, holding the interpreter's lock
        return bool(re.fullmatch("(a+)+b", "a" * 60))
    if what == "loop":
        while True:
            pass
    if what == "sleep":
        time.sleep(number)
    if what == "allocate":
        return len(bytearray(number))
    if what == "refuse":
        raise DataError("expected something else")
    if what == "surprise":
        raise KeyError("nobody foresaw this")
    if what == "exit":
        os._exit(number)
    if what == "abort":
        os.abort()
    if what == "print":
        print("not a reply", flush=True)
        os.write(1, b"nor this")
    if what == "long":
        return "x" * number
    if what == "write":
        with open(f"/tmp/coserve-sandbox-{os.getpid()}", "w") as file:
            file.write("x" * number)
    if what == "environment":
        return dict(os.environ)
    return None


def items(number: int) -> Iterator[int]:
    yield from range(number)
