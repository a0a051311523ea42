"""Costs of lanes: how much longer each kind of work takes beside the other than on the whole machine."""

from typing import Final

_MEMORY: Final = 0.05  # of one step
_RANGE: Final = 4.0  # a step this many times slower or faster teaches no more than one exactly so


class LaneCosts:
    """Factors on what the cost model predicts, learned from steps of a split machine.

    With everything shared evenly each is two. Work that cannot use a whole machine (small products, the
    overhead between them) loses less: a little less is assumed until steps have shown it.
    """

    UNKNOWN: Final = (1.8, 1.8)

    def __init__(self) -> None:
        self.inference, self.training = self.UNKNOWN

    def start(self, inference: float, training: float) -> None:
        """Takes over factors that were measured."""
        self.inference, self.training = _within(inference), _within(training)

    @property
    def gain(self) -> float:
        """Work that both lanes do beside each other beyond what they do one after the other, as a share of
        what the machine does."""
        return 1 / self.inference + 1 / self.training - 1

    def observe_inference(self, factor: float) -> None:
        """Takes in what a step's inference took beside training, relative to what it takes alone."""
        self.inference += _MEMORY * (_within(factor) - self.inference)

    def observe_training(self, factor: float) -> None:
        """Takes in how long training took beside inference."""
        self.training += _MEMORY * (_within(factor) - self.training)


def _within(factor: float) -> float:
    return min(max(factor, 1 / _RANGE), _RANGE)
