"""Pauses a step's training while callers wait to hand over new work."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from coserve.core.request import SLO
from coserve.executors.step_executor import StepExecutor


class Arrivals:
    """Counts callers that wait for the step under way to end; training is paused while there are any but
    those that bear its time.

    `announce` and `taken` are called by any thread, `before_step` and `give_way` by the one that steps.
    `under_way` are the seconds that the plans under way are predicted to take.
    """

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self.under_way = 0.0
        self._coming = self._pressing = 0
        self._changed = threading.Condition()

    def pause_training(self) -> None:
        """Stops the training under way behind its present slice."""
        self._executor.pause_training()

    def presses(self, slo: SLO) -> bool:
        """Tells whether a request with these bounds does not bear to wait for the plans under way."""
        return not slo.bears(self.under_way)

    def announce(self, presses: bool = True) -> None:
        """Counts a caller that waits for the end of the step; one that `presses` pauses its training."""
        with self._changed:
            self._coming += 1
            self._pressing += presses
            if presses:
                self._executor.pause_training()

    def taken(self, presses: bool = True) -> None:
        """Withdraws an announcement: the caller's work has reached the scheduler."""
        with self._changed:
            self._coming -= 1
            self._pressing -= presses
            self._changed.notify_all()

    @contextmanager
    def arriving(self, presses: bool = True) -> Iterator[None]:
        """Calls `announce` before the block and `taken` after it."""
        self.announce(presses)
        try:
            yield
        finally:
            self.taken(presses)

    def before_step(self) -> bool:
        """Resumes training if no caller presses. Returns whether one does."""
        with self._changed:
            if not self._pressing:
                self._executor.resume_training()
            return self._pressing > 0

    def give_way(self, seconds: float = 0.1) -> None:
        """Waits for callers on other threads to take the engine's lock, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._coming, seconds)
