"""Interference: how much slower answers and training are beside each other than on the whole machine."""

from typing import Final

_MEMORY: Final = 0.05  # weight of one step in the running mean
_RANGE: Final = 4.0  # bound on the ratio of measured to predicted seconds that is learned from


class Interference:
    """Factors on what the cost model predicts, learned from steps in which both ran.

    An even split of everything gives two. Work that cannot use a whole machine (small products, the overhead
    between them) is slowed less, so the initial factors are a little lower.
    """

    UNKNOWN: Final = (1.8, 1.8)

    def __init__(self) -> None:
        self.inference, self.training = self.UNKNOWN

    def start(self, inference: float, training: float) -> None:
        """Sets measured factors."""
        self.inference, self.training = _within(inference), _within(training)

    @property
    def gain(self) -> float:
        """Relative throughput gain of both side by side over one after the other."""
        return 1 / self.inference + 1 / self.training - 1

    def observe_inference(self, factor: float) -> None:
        """Records the slowdown of a step's answers beside training."""
        self.inference += _MEMORY * (_within(factor) - self.inference)

    def observe_training(self, factor: float) -> None:
        """Records the slowdown of training beside answers."""
        self.training += _MEMORY * (_within(factor) - self.training)


def _within(factor: float) -> float:
    return min(max(factor, 1 / _RANGE), _RANGE)
