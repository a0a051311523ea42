"""Safety margin of predicted times: a high quantile of recent prediction errors."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import log
from typing import Final, Self

WINDOW: Final = 256  # recent steps: some seconds, so that a machine that becomes busy is noticed at once
HISTORY: Final = 1024  # recent steps of a kind of which the longest is kept
_BODY: Final = 0.9  # share of steps below the threshold of the tail; the excess of the rest gives its slope
_FEWEST: Final = 16  # steps before a quantile means anything
_UNKNOWN: Final = 0.5  # margin until then
# Seconds by which a system holds up a GPU's host so seldom that the steps so far need not show it: 2.8 ms in
# one step of a load, on an idle machine, made each answer under way late at 20 ms a token.
RARE_DELAY: Final = 3.5e-3
_AT_MOST: Final = 0.2  # of a bound
LONGEST: Final = 256  # tokens of an answer that count; the chance of a single one would become too small


class Margin:
    """Relative prediction errors of recent steps, and the margin that covers nearly all of them.

    Steps that train have larger errors, so each kind has its own. A kind with few recent steps uses the
    errors of all: otherwise training that was cut back on a busy machine would never get the steps that show
    that the machine is free again.

    Events rarer than one in `WINDOW` steps, such as another process that gets the processor, are not part of
    the extrapolated tail. Where so rare a step counts, the margin is at least the longest of the last
    `HISTORY` steps.
    """

    def __init__(self) -> None:
        self._newest: deque[tuple[bool, float]] = deque(maxlen=WINDOW)
        self._histories = {kind: deque[float](maxlen=HISTORY) for kind in (False, True)}
        self._tails: dict[bool, tuple[_Tail, float]] = {}  # of recent steps, and the longest one, by kind

    def observe(self, ratio: float, trains: bool) -> None:
        """Records one step's measured over its predicted time."""
        self._newest.append((trains, ratio))
        self._histories[trains].append(ratio)
        self._tails.clear()

    def covering(self, share: float, trains: bool) -> float:
        """Relative margin within which `share` of such steps stay."""
        if len(self._newest) < _FEWEST:
            return _UNKNOWN
        if share < _BODY:
            return max(quantile(self._alike(trains), share) - 1.0, 0.0)
        if trains not in self._tails:
            self._tails[trains] = _Tail.of(self._alike(trains), _BODY), self._longest(trains)
        tail, longest = self._tails[trains]
        is_rare = (1.0 - share) * WINDOW < 1.0
        return max(tail.quantile(share) - 1.0, longest - 1.0 if is_rare else 0.0, 0.0)

    def _alike(self, trains: bool) -> list[float]:
        alike = [ratio for kind, ratio in self._newest if kind is trains]
        return alike if len(alike) >= _FEWEST else [ratio for _, ratio in self._newest]

    def _longest(self, trains: bool) -> float:
        own = self._histories[trains]
        return max(own if len(own) >= WINDOW else chain(*self._histories.values()))


def left_of(seconds: float, bound: float, margin: float, usual: float, delay: float) -> float:
    """The part of `seconds`, which a bound on each token leaves, that steps may be predicted to take: without
    the relative `margin` of an answer's steps, or without a rare `delay` of the host and the `usual` margin
    of one step, whichever leaves less."""
    left = seconds / (1 + margin)
    return min(left, (seconds - min(delay, _AT_MOST * bound)) / (1 + usual)) if delay else left


def share_of_steps(reliability: float, tokens: int) -> float:
    """Share of steps that must keep a bound if `reliability` of answers of `tokens` tokens keep it each time.

    Steps late one by one at random: 0.5 % of them make 15 % of answers of 32 tokens late.
    """
    return 1.0 - (1.0 - reliability) / min(max(tokens, 1), LONGEST)


@dataclass(frozen=True, slots=True)
class _Tail:
    """The upper end of a distribution: a share `beyond` exceeds `threshold`, by `excess` on average."""

    threshold: float
    excess: float
    beyond: float

    @classmethod
    def of(cls, values: Sequence[float], body: float) -> Self:
        ordered = sorted(values)
        usual = min(int(len(ordered) * body), len(ordered) - 1)
        threshold, beyond = ordered[max(usual - 1, 0)], ordered[usual:]
        return cls(threshold, sum(beyond) / len(beyond) - threshold, len(beyond) / len(ordered))

    def quantile(self, share: float) -> float:
        """Quantile at `share` of the distribution, at least the threshold."""
        return self.threshold + self.excess * max(log(self.beyond / max(1.0 - share, 1e-9)), 0.0)


def quantile(values: Sequence[float], share: float) -> float:
    """Upper quantile of `values`, with an exponential tail above a threshold, so that few samples suffice.

    Rare long steps decide whether whole answers keep their bound, so the tail is extrapolated. Excesses over
    a high threshold are nearly exponential (Pickands; Balkema and de Haan), and their mean is known better
    than their maximum.
    """
    return _Tail.of(values, min(_BODY, share)).quantile(share)
