"""Runs a module whose imports take seconds, without others noticing: `python -m coserve.wire.gently MODULE`.

The module's `main` is called once it is imported.
"""

import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module

LOWEST = 19  # niceness


def import_gently(modules: Sequence[str]) -> None:
    """Imports modules at the lowest priority, and returns at the usual one.

    It is a thread that is given the low priority: only root may raise that of a process again. Where threads
    have none of their own (elsewhere than Linux) this is an import like any other.
    """

    def work() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        for name in modules:
            import_module(name)

    thread = threading.Thread(target=work, name="gentle-import")
    thread.start()
    thread.join()
    for name in modules:  # there already; one that failed raises here, where the caller hears it
        import_module(name)


if __name__ == "__main__":
    import_gently([sys.argv[1]])
    import_module(sys.argv[1]).main()
