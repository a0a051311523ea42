"""Training that stops for who arrives: at the next boundary between two layers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from coserve.core.plan import Executor


class TrainingPause:
    """Whether the training of the step under way stops at the next boundary between layers.

    `ask` and `withdraw` may be called by any thread; the rest belongs to the thread that runs the step. The
    first layer of a step's training always runs: arrivals in every step slow training down and never stop it.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._obeys = False
        self._layers = 0

    def ask(self) -> None:
        self._asked.set()

    def withdraw(self) -> None:
        self._asked.clear()

    def begin(self, pausable: bool) -> None:
        """A step begins; `pausable` says whether its training may be stopped."""
        self._obeys, self._layers = pausable, 0

    def passed(self) -> None:
        """Training has passed a layer, or the tail."""
        self._layers += 1

    @property
    def is_due(self) -> bool:
        """Whether training stops here."""
        return self._obeys and self._layers > 0 and self._asked.is_set()


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
        """What was announced has reached the scheduler."""
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
