"""Bounds what is taken between two steps: what has come waits for its turn, and no step for a burst."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

# Seconds for which a step may wait. A step of answers alone takes 3 to 50 ms, so a burst of commands makes
# others' tokens at most some times slower, whatever its length.
MOST: Final = 0.02
_UNSEEN: Final = 0.005  # seconds that a kind of work is expected to take which has not been seen
_NEWEST: Final = 0.25  # weight of the newest measurement in a kind's mean


class Intake:
    """Tells how much work fits between two steps, by what each kind of it has taken. One piece always
    does."""

    def __init__(self, most: float = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._expected: dict[str, float] = {}  # seconds, by kind
        self._spent: float | None = None  # in this turn; None before the first piece

    def begin(self) -> None:
        """Begins a turn: a step has run."""
        self._spent = None

    def takes(self, kind: str) -> bool:
        """Tells whether one more piece of a kind fits into this turn."""
        if self._spent is None:
            return True
        return self._spent + self._expected.get(kind, _UNSEEN) <= self._most

    @contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        """Context in which a piece runs."""
        begun = self._clock()
        try:
            yield
        finally:
            taken = self._clock() - begun
            self._spent = (self._spent or 0.0) + taken
            expected = self._expected.get(kind, taken)
            self._expected[kind] = expected + _NEWEST * (taken - expected)
