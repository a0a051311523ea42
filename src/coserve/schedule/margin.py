"""Margin of predicted times: a high quantile of what the newest steps took beyond it."""

from collections import deque
from collections.abc import Sequence
from math import log
from typing import Final

WINDOW: Final = 256  # steps remembered: some seconds, so that a machine that becomes busy is noticed at once
_BODY: Final = (
    0.9  # share of steps that counts as usual; how far the rest lie beyond says how the tail goes on
)
_FEWEST: Final = 16  # steps before a quantile means anything
_UNKNOWN: Final = 0.5  # margin until then


class Margin:
    """Relative misses of the newest steps, and the margin that covers nearly all.

    Steps that train miss by more than others, so each kind is judged by its own. What is no longer tried is
    forgotten: a kind that had few steps of late is judged by all, or training that was cut short while the
    machine was busy would never find out that it is not any more.
    """

    def __init__(self) -> None:
        self._newest: deque[tuple[bool, float]] = deque(maxlen=WINDOW)

    def observe(self, ratio: float, trains: bool) -> None:
        """Takes in one step: what it took, over what was predicted."""
        self._newest.append((trains, ratio))

    def covering(self, share: float, trains: bool) -> float:
        """Relative margin with which `share` of all such steps take no longer than predicted."""
        alike = [ratio for kind, ratio in self._newest if kind is trains]
        known = alike if len(alike) >= _FEWEST else [ratio for _, ratio in self._newest]
        return max(quantile(known, share) - 1.0, 0.0) if len(known) >= _FEWEST else _UNKNOWN


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all exceed not, also where so few are known that none is that rare.

    The rare long step decides whether whole answers keep a bound. So the tail is not read off but extended:
    what lies beyond a high threshold is close to exponential (Pickands; Balkema and de Haan), and its mean
    is known better than its end.
    """
    ordered = sorted(values)
    usual = min(int(len(ordered) * min(_BODY, share)), len(ordered) - 1)
    threshold, beyond = ordered[max(usual - 1, 0)], ordered[usual:]
    excess = sum(beyond) / len(beyond) - threshold
    rarer = len(beyond) / len(ordered) / max(1.0 - share, 1e-9)
    return threshold + excess * max(log(rarer), 0.0)
