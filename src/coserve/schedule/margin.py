"""Safety margin of predicted times: a high quantile of recent prediction errors."""

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
    """Relative prediction errors of recent steps, and the margin that covers nearly all of them.

    Steps that train have larger errors, so each kind has its own. A kind with few recent steps uses the
    errors of all: otherwise training that was cut back on a busy machine would never get the steps that show
    that the machine is free again.
    """

    def __init__(self) -> None:
        self._newest: deque[tuple[bool, float]] = deque(maxlen=WINDOW)

    def observe(self, ratio: float, trains: bool) -> None:
        """Records one step's measured over its predicted time."""
        self._newest.append((trains, ratio))

    def covering(self, share: float, trains: bool) -> float:
        """Relative margin within which `share` of such steps stay."""
        alike = [ratio for kind, ratio in self._newest if kind is trains]
        known = alike if len(alike) >= _FEWEST else [ratio for _, ratio in self._newest]
        return max(quantile(known, share) - 1.0, 0.0) if len(known) >= _FEWEST else _UNKNOWN


def quantile(values: Sequence[float], share: float) -> float:
    """Upper quantile of `values`; above a threshold an exponential tail, so few samples suffice.

    Rare long steps decide whether whole answers keep their bound. So the tail is extrapolated: excesses over
    a high threshold are nearly exponential (Pickands; Balkema and de Haan), and their mean is better known
    than their maximum.
    """
    ordered = sorted(values)
    usual = min(int(len(ordered) * min(_BODY, share)), len(ordered) - 1)
    threshold, beyond = ordered[max(usual - 1, 0)], ordered[usual:]
    excess = sum(beyond) / len(beyond) - threshold
    rarer = len(beyond) / len(ordered) / max(1.0 - share, 1e-9)
    return threshold + excess * max(log(rarer), 0.0)
