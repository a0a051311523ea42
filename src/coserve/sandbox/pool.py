"""Sandboxes of one function that callers share: each call takes one for itself."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coserve.errors import LimitExceeded
from coserve.sandbox.process import Sandbox


class SandboxPool:
    """At most `size` children for one function. A call takes an idle child, starts one, or waits; no lock is
    held while it runs. Callers see to it that one tenant has one call at a time (`serve.offload`)."""

    def __init__(self, target: str, size: int, memory: int, keep: tuple[str, ...] = ()) -> None:
        self._target, self._memory, self._keep = target, memory, keep
        self._free = [self._fresh() for _ in range(size)]
        self._taken: list[Sandbox] = []
        self._closed = False
        self._changed = threading.Condition()

    def call(self, *arguments: Any, seconds: float) -> Any:
        """The function's result; see `Sandbox.call`."""
        with self.lease() as sandbox:
            return sandbox.call(*arguments, seconds=seconds)

    @contextmanager
    def lease(self) -> Iterator[Sandbox]:
        """A sandbox for the time of the context; one that is killed in it is replaced. Raises LimitExceeded
        after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise LimitExceeded("the work was ended")
            sandbox = self._free.pop()  # the one used last, whose caches are warm
            self._taken.append(sandbox)
        try:
            yield sandbox
        finally:
            if sandbox.is_killed:
                sandbox.close()
            with self._changed:
                self._taken.remove(sandbox)
                self._free.append(self._fresh() if sandbox.is_killed else sandbox)
                self._changed.notify()

    def close(self) -> None:
        """Ends all children; calls under way raise LimitExceeded, and so do later ones."""
        with self._changed:
            self._closed = True
            ended = (*self._free, *self._taken)
            self._changed.notify_all()
        for sandbox in ended:
            sandbox.kill()

    def _fresh(self) -> Sandbox:
        return Sandbox(self._target, self._memory, self._keep)


class Cancellation:
    """Ends work that another thread does in a sandbox: at once, or as soon as it has one."""

    def __init__(self) -> None:
        self._sandbox: Sandbox | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Ends the work, which raises LimitExceeded."""
        with self._lock:
            self._is_cancelled = True
            if self._sandbox is not None:
                self._sandbox.kill()

    @contextmanager
    def of(self, sandbox: Sandbox) -> Iterator[None]:
        """The context in which the work has this sandbox."""
        with self._lock:
            if self._is_cancelled:
                raise LimitExceeded("the work was ended")
            self._sandbox = sandbox
        try:
            yield
        finally:
            with self._lock:
                self._sandbox = None
