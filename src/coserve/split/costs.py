"""Seconds of a product by its rows, and rates, learned while the executor runs."""

from math import exp
from typing import Final

_FADE: Final = 0.98  # factor on the weight of earlier products, with each further one
_OUTLIER: Final = 4.0  # bound on the ratio of measured to predicted seconds that is learned from
_ALIKE: Final = 1e-6  # variance of the row counts, relative to their square, below which they count as equal
_SPAN: Final = 10.0  # seconds that a rate is taken over; older ones fade


class ProductCost:
    """A time for reading weights and one for each row, fitted by least squares on the relative error.

    While all products had one row count, fewer rows are predicted in proportion and more as long as these: a
    call for which nothing is known waits too little rather than too long.
    """

    def __init__(self) -> None:
        self.fixed = self.per_row = 0.0  # seconds
        self._longest = float("inf")
        self._sums = [0.0] * 5  # of w, w r, w r^2, w t, w r t, where w = 1 / t^2

    def seconds(self, rows: int) -> float:
        """Predicted seconds of a product of so many rows; 0 where none has been measured."""
        return min(self.fixed + rows * self.per_row, self._longest)

    def shared(self, rows: int) -> float:
        """Seconds of a product of so many rows that company would spare it: those for reading weights, or all
        of them while nothing is known but one row count."""
        whole = self.seconds(rows)
        return min(self.fixed, whole) if self._longest == float("inf") else whole

    def observe(self, rows: int, seconds: float) -> None:
        """Learns from one product."""
        if seconds <= 0:
            return
        if self._sums[0] and self._longest == float("inf"):  # one row count says nothing of others
            seconds = min(seconds, _OUTLIER * self.seconds(rows))
        weight = seconds**-2
        new = (1.0, rows, rows * rows, seconds, rows * seconds)
        self._sums = [_FADE * old + weight * value for old, value in zip(self._sums, new, strict=True)]
        self._fit()

    def _fit(self) -> None:
        one, rows, squares, seconds, products = self._sums
        spread = one * squares - rows * rows
        self._longest = float("inf")
        if spread <= _ALIKE * one * squares:
            self._longest = seconds / one
            self.fixed, self.per_row = 0.0, seconds / rows
            return
        self.per_row = max((one * products - rows * seconds) / spread, 0.0)
        self.fixed = (seconds - self.per_row * rows) / one
        if self.fixed < 0:
            self.fixed, self.per_row = 0.0, products / squares


class RecentRate:
    """Units a second of the last seconds."""

    def __init__(self) -> None:
        self.total = 0
        self._recent = self._at = 0.0

    def add(self, count: int, now: float) -> None:
        """Counts `count` units at `now`, in seconds of any clock that does not go back."""
        self._recent = self._faded(now) + count
        self._at = now
        self.total += count

    def a_second(self, now: float) -> float:
        """The rate at `now`."""
        return self._faded(now) / _SPAN

    def _faded(self, now: float) -> float:
        return self._recent * exp(-max(now - self._at, 0.0) / _SPAN)
