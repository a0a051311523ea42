"""The overlap of plans: what the scheduler asks of an executor that runs several of them at once."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Overlap:
    """An executor's `plans` at once, of which `rate` begin in the seconds that one takes
    (`executors.executor.ExecutorSpec`). A pipeline has as many of both as it has stages.

    The answers are shared out over the plans at once, as a row waits for the token before it until that has
    passed all stages. Training windows that pass some layers have one stage at work while the others wait. So
    they pass all layers in one plan, and are cut in rows, unless the executor `trains_apart`: then training
    of two plans never runs at once.
    """

    plans: int = 1
    rate: float = 1.0
    trains_apart: bool = False

    @property
    def is_possible(self) -> bool:
        """Tells whether there is an executor of which this is true."""
        return self.plans >= 1 and self.rate >= 1

    def interval(self, seconds: float) -> float:
        """Seconds from one plan's begin to the next one's, or of one stage, where each plan takes so many."""
        return seconds / self.rate

    def share(self, sequences: int) -> int:
        """One plan's equal part of so many sequences."""
        return -(-sequences // self.plans)

    def beside(self, sequences: int) -> int:
        """Number of other plans, at once with the next one, that may have rows of so many sequences."""
        return min(sequences, self.plans - 1)

    @property
    def cuts_layers(self) -> bool:
        """Tells whether a training window may pass some of the layers in one plan and the rest later."""
        return self.plans == 1 or self.trains_apart

    def own_host(self, seconds: float, known: float) -> float:
        """The host's part of `seconds` beside a plan, which usually is `known`: all of them, or no more than
        that where other plans run meanwhile."""
        return seconds if self.plans == 1 else min(seconds, known)

    def saved(self, seconds: float) -> float:
        """Slack that a plan leaves to a later one: none where others, under way, spend it as well."""
        return seconds if self.plans == 1 else 0.0


ALONE: Final = Overlap()  # one plan after the other
