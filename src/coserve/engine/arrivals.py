"""Callers that bring work while a step runs: its training pauses for them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from coserve.executors.executor import Executor


class Arrivals:
    """Counts callers that bring work while a step runs, and pauses training as long as one of them waits.

    `announce` and `taken` are called by any thread, `before_step` and `give_way` by the one that steps.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._coming = 0
        self._changed = threading.Condition()

    def announce(self) -> None:
        """Somebody waits until the step under way is over."""
        with self._changed:
            self._coming += 1
            self._executor.pause_training()

    def taken(self) -> None:
        """Withdraws an announcement: it has reached the scheduler."""
        with self._changed:
            self._coming -= 1
            self._changed.notify_all()

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """`announce` before the block and `taken` after it."""
        self.announce()
        try:
            yield
        finally:
            self.taken()

    def before_step(self) -> None:
        """Lets training go on if nobody waits any more."""
        with self._changed:
            if not self._coming:
                self._executor.resume_training()

    def give_way(self, seconds: float = 0.1) -> None:
        """Waits for callers on other threads to take the engine's lock, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._coming, seconds)
