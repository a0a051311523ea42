"""Speculation between workers (BlockLLM, 5.2): a block's surrogate predicts its output, with which the next
block goes on while the block itself computes.

The slowest instances have a surrogate, which runs before its block. Two neighbours in a chain are never
speculated on, nor is the last block, whose output cannot be taken back. Whatever is computed of a prediction
is held at the block behind until the prediction is verified; where it is wrong, that block's pages of these
rows are taken back, and it computes them again. So nothing of a wrong prediction is ever passed on.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from math import ceil, sqrt
from typing import Final

from coserve.core.ranges import BELOW_ONE, SMALLEST, check_range
from coserve.errors import ConfigError

ACCEPTED: Final = 0.95  # cosine similarity from which a prediction is right (7.1)
SPECULATED: Final = 0.1  # share of the instances that have a surrogate beside them (7.1)


class SpeculationStep(StrEnum):
    """The next thing to do for rows on their way: wait, pass on what was computed of the prediction, or take
    it back and compute with the block's own output."""

    WAIT = "wait"
    PASS_ON = "pass_on"
    COMPUTE_AGAIN = "compute_again"


def bottlenecks(seconds: Mapping[tuple[str, str], float], share: float = SPECULATED) -> list[tuple[str, str]]:
    """The slowest instances, by worker and content, by the seconds of completing their queues: a `share` of
    all, one at least; those without work are none."""
    check_range("share", share, SMALLEST, 1.0)
    busy = sorted((one for one in seconds if seconds[one] > 0.0), key=lambda one: (-seconds[one], one))
    return busy[: ceil(len(seconds) * share)]


def speculated_places(
    chain: Sequence[tuple[str, str]], slowest: Iterable[tuple[str, str]], surrogates: Iterable[str],
    approximates: bool,
) -> list[int]:  # fmt: skip
    """Places of a request's chain of instances at which its rows go ahead, in order: where the instance is
    one of the slowest (`slowest`, most urgent first) and its block has a surrogate. Nothing for a request
    that allows no approximation: a prediction of 0.95 is not the block's output."""
    there = set(surrogates)
    found: set[int] = set()
    for wanted in slowest if approximates else ():
        for place, instance in enumerate(chain[:-1]):
            if instance == wanted and instance[1] in there and not {place - 1, place + 1} & found:
                found.add(place)
    return sorted(found)


def similarity(predicted: Sequence[float], computed: Sequence[float]) -> float:
    """The cosine of two outputs; 0 where either has no direction or is no number."""
    if len(predicted) != len(computed):
        raise ConfigError(
            f"a prediction has {len(predicted)} numbers, and the block's output {len(computed)}"
        )
    norm = sqrt(sum(x * x for x in predicted)) * sqrt(sum(y * y for y in computed))
    if not SMALLEST < norm < float("inf"):
        return 0.0
    return sum(x * y for x, y in zip(predicted, computed, strict=True)) / norm


class RowsAhead:
    """Rows that go ahead at one place of their chain. `came` and `computed` tell of the prediction at the
    block behind, `verified` of the block's own output; each returns what that block does next. Whatever order
    these come in, exactly one of them says `PASS_ON` or `COMPUTE_AGAIN`, once."""

    def __init__(self, accepted: float = ACCEPTED) -> None:
        check_range("accepted", accepted, -1.0, BELOW_ONE)
        self._accepted = accepted
        self._is_computed = False
        self.holds: bool | None = None
        self.has_come = False

    def came(self) -> bool:
        """The prediction is at the block behind; tells whether that is to compute with it: unless it is known
        to be wrong. One that comes behind its verification is of use where it holds, as the block's own
        output is not sent then and would come later still."""
        self.has_come = self.holds is not False
        return self.has_come

    def computed(self) -> SpeculationStep:
        """The block behind has computed with the prediction."""
        assert self.has_come and not self._is_computed, "the prediction came, and is computed with once"
        self._is_computed = True
        if self.holds is None:
            return SpeculationStep.WAIT
        return SpeculationStep.PASS_ON if self.holds else SpeculationStep.COMPUTE_AGAIN

    def verified(self, cosine: float) -> SpeculationStep:
        """The block itself has computed. A cosine that is no number is not near enough. A wrong prediction
        under way is waited for, such that its pages are taken back once, behind it."""
        assert self.holds is None, "an output is verified once"
        self.holds = cosine >= self._accepted
        if not self._is_computed and (self.holds or self.has_come):
            return SpeculationStep.WAIT
        return SpeculationStep.PASS_ON if self.holds else SpeculationStep.COMPUTE_AGAIN

    @property
    def is_wrong(self) -> bool:
        """Tells whether pages at the block behind are of a wrong prediction and have to be taken back."""
        return self.holds is False and self._is_computed
