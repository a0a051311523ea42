"""Pauses training at the next boundary between two layers."""

import threading

from coserve.errors import WeightsUnreadable


class TrainingPause:
    """Stops the training of the step under way at the next boundary between layers.

    `ask` and `withdraw` may be called by any thread; the rest belongs to the thread that runs the step. The
    first layer of a step's training always runs: arrivals in every step slow training down and never stop it.
    `failure` is what else has stopped the step's training.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._obeys = False
        self._layers = 0
        self.failure: WeightsUnreadable | None = None

    def ask(self) -> None:
        self._asked.set()

    def withdraw(self) -> None:
        self._asked.clear()

    def begin(self, pausable: bool) -> None:
        """Begins a step; `pausable` tells whether its training may be stopped."""
        self._obeys, self._layers, self.failure = pausable, 0, None

    def passed(self) -> None:
        """Records that a layer, or the tail, is passed."""
        self._layers += 1

    @property
    def is_due(self) -> bool:
        """Tells whether training stops here."""
        return self._obeys and self._layers > 0 and self._asked.is_set()
