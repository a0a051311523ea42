"""Utilization of the machine by inference, and its effect on the slowdown of answers."""

from math import exp
from typing import Final

_SPAN: Final = 30.0  # seconds that count; older ones fade


class Utilization:
    """Share of recent time that the rows of inference have taken.

    Reading the weights does not count: more requests at once share it.
    """

    def __init__(self) -> None:
        self._busy = self._elapsed = 0.0
        self._newest: float | None = None

    def observe(self, now: float, inference: float) -> None:
        """Records a step that ended at `now` and whose rows of inference took `inference` seconds."""
        elapsed = 0.0 if self._newest is None else max(now - self._newest, 0.0)
        fade = exp(-elapsed / _SPAN)
        self._busy = self._busy * fade + min(inference, elapsed)
        self._elapsed = self._elapsed * fade + elapsed
        self._newest = now

    @property
    def share(self) -> float:
        """0 (idle, or nothing known) to 1."""
        return self._busy / self._elapsed if self._elapsed else 0.0


def own_slowdown(slowdown: float, utilization: float) -> float:
    """The slowdown that training may cause an answer directly, so that it is `slowdown` with all others
    slowed down as well.

    Answers that take longer overlap with more others. On a machine shared by all present (M/G/1 processor
    sharing) the mean time is in proportion to 1 / (1 - utilization). Training is another user: its share of
    the machine is (1 - utilization) (1 - 1 / slowdown).
    """
    return slowdown / (1.0 + utilization * (slowdown - 1.0))
