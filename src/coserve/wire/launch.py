"""Starts a child of the supervisor: `python -m coserve.wire.launch [--low-priority] [--ranks=N] MODULE`.

Before the module is imported, which can take seconds, this sets up that the process ends with its supervisor,
sends heartbeats, and logs the stacks of its threads on abort. Then it calls the module's `main` with the
pipes.
"""

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Final

from coserve.wire.child import SupervisorPipes

LOWEST: Final = 19  # niceness
LOW_PRIORITY: Final = "--low-priority"
RANKS: Final = "--ranks="  # for an engine that stands by: so many processes are to stand by with it
_PR_SET_PDEATHSIG: Final = 1


def launch(arguments: Sequence[str]) -> None:
    """Runs the module named in the last argument."""
    module = arguments[-1]
    die_with_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes is no reason to end
    faulthandler.enable()
    pipes = SupervisorPipes()
    pipes.own_crashes()
    import_uncollected(module, LOW_PRIORITY in arguments).main(pipes)


def import_uncollected(module: str, low_priority: bool = False) -> ModuleType:
    """Imports a module without collections of garbage meanwhile, and leaves all objects that are there then
    out of later ones: a million, which stay. With `low_priority` at the lowest priority."""
    gc.disable()
    try:
        if low_priority:
            low_priority_import(module)
        return import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def low_priority_import(module: str) -> None:
    """Imports a module at the lowest priority, and returns at the usual one.

    A thread gets the low priority, as only root may raise that of a process again. Where threads have no
    priority of their own (outside of Linux) this is a plain import.
    """

    def work() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        import_module(module)  # where it fails the caller's own import raises

    thread = threading.Thread(target=work, name="low-priority-import")
    thread.start()
    thread.join()


def die_with_parent() -> None:
    """Has Linux kill this process when the thread that started it ends, even if it hangs or is stopped.
    Elsewhere only the end of what it reads ends the process."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    launch(sys.argv[1:])
