"""Pauses training between two slices, or gives the layer under way up."""

import threading
import time
from collections.abc import Callable

from coserve.errors import PassFailed


class LayerAbandoned(PassFailed):
    """Raised inside a layer that is given up for an arrival. Nothing of it counts: it runs anew
    later."""


class TrainingPause:
    """Stops the training of the step under way between two of its slices.

    `ask` and `withdraw` may be called by any thread; the rest belongs to the thread that runs the step. The
    first slice of a step's training runs, so that arrivals in every step slow training down and never stop
    it. In a step that `abandons`, the layer under way is given up, the first one too, if the pause is asked
    for during the step: half of a layer is lost on average, where an arrival would wait as long. Of two
    steps in a row at most one ends without a slice done.

    Several ranks stop behind the same slice, and within none: `agree` gives what the first of them has.
    """

    def __init__(self, agree: Callable[[bool], bool] | None = None) -> None:
        self._asked, self._agree = threading.Event(), agree
        self._obeys = self._abandons = self._has_abandoned = False
        self._slices = 0  # done in the step
        self._was_in_vain = False  # the last step, which did no slice
        self._passed_at = 0.0
        self.lost = 0.0  # seconds of the step's abandoned layer
        self._failure: PassFailed | None = None  # of training, since `take_failure`

    def ask(self) -> None:
        self._asked.set()

    def withdraw(self) -> None:
        self._asked.clear()

    def begin(self, pausable: bool, abandons: bool = False) -> None:
        """Begins a step; `pausable` tells whether its training may be stopped, `abandons` whether within a
        layer too."""
        self._obeys, self._slices, self.lost = pausable, 0, 0.0
        self._abandons = pausable and abandons and not self._was_in_vain and not self._asked.is_set()
        self._abandons = self._abandons and self._agree is None
        self._was_in_vain = self._has_abandoned = False
        self._passed_at = time.perf_counter()

    def passed(self) -> None:
        """Records that a slice is done, or the pass of windows that share it with answers."""
        self._slices += 1
        self._passed_at = time.perf_counter()

    def ran(self, run: Callable[[], object]) -> bool:
        """Runs a slice. False where training stops behind it: its layer is abandoned, or a pass has
        failed."""
        try:
            run()
        except LayerAbandoned:
            return False
        except PassFailed as error:
            self._failure = error.with_traceback(None)  # whose frames hold windows
            return False
        self.passed()
        return True

    def take_failure(self) -> PassFailed | None:
        """Returns, once, the failure that has stopped training."""
        failure, self._failure = self._failure, None
        return failure

    def went_on(self) -> None:
        """Records that training goes on after work of others."""
        self._passed_at = time.perf_counter()

    def check(self) -> None:
        """Raises LayerAbandoned where the layer under way is given up. Called between its products, unless
        answers share them."""
        if self._abandons and self._asked.is_set():
            self._was_in_vain, self._has_abandoned = not self._slices, True
            self.lost = time.perf_counter() - self._passed_at
            raise LayerAbandoned

    @property
    def is_due(self) -> bool:
        """Tells whether training stops here."""
        if self._has_abandoned or not (self._obeys and self._slices):
            return self._has_abandoned
        asked = self._asked.is_set()
        return asked if self._agree is None else self._agree(asked)
