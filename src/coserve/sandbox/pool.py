"""Sandboxes of one function that callers share: each call takes one for itself."""

import threading
from typing import Any

from coserve.sandbox.process import Sandbox


class SandboxPool:
    """At most `size` children for one function. A call takes an idle child, starts one, or waits; no lock is
    held while it runs. Callers see to it that one tenant has one call at a time (`serve.offload`)."""

    def __init__(self, target: str, size: int, memory: int, keep: tuple[str, ...] = ()) -> None:
        self._free = [Sandbox(target, memory, keep) for _ in range(size)]
        self._all = tuple(self._free)
        self._changed = threading.Condition()

    def call(self, *arguments: Any, seconds: float) -> Any:
        """The function's result; see `Sandbox.call`."""
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            sandbox = self._free.pop()  # the one used last, whose caches are warm
        try:
            return sandbox.call(*arguments, seconds=seconds)
        finally:
            with self._changed:
                self._free.append(sandbox)
                self._changed.notify()

    def close(self) -> None:
        """Ends all children; calls under way raise LimitExceeded, and so do later ones."""
        for sandbox in self._all:
            sandbox.kill()
