"""Seconds in which a step reads the weights of a streamed base, beside which its rows are computed."""

from collections.abc import Iterable

from coserve.core.plan import WeightReads

_MEMORY = 0.1  # of one step's rate
_FEW = 1 << 20  # bytes from which on a rate is one of the disk, not of a call


class ReadCosts:
    """Costs of reading (FineInfer, section 3.3). A pass over the weights takes the longer of reading and
    computing: rows that are computed while weights are read cost nothing.

    `layers` has a bit for each layer that is read in every visit, of `nbytes` bytes each, at `rate` bytes a
    second, as learned. Without layers nothing is ever read.
    """

    def __init__(self) -> None:
        self.layers = 0
        self.nbytes = 0.0
        self.rate = float("inf")

    def start(self, layers: Iterable[int], pass_nbytes: int, rate: float) -> None:
        """Sets the layers that are read, their bytes in all, and a first rate."""
        self.layers = sum(1 << layer for layer in layers)
        self.nbytes = pass_nbytes / max(self.layers.bit_count(), 1)
        self.rate = rate

    @property
    def pass_seconds(self) -> float:
        """Seconds in which a pass over all layers reads their weights."""
        return self.seconds(self.layers.bit_count())

    def seconds(self, visits: int) -> float:
        """Seconds of reading for so many visits of layers."""
        return visits * self.nbytes / self.rate if visits else 0.0

    def observe(self, reads: WeightReads) -> None:
        """Learns the rate from what was read in one step."""
        if reads.nbytes >= _FEW and reads.seconds > 0:
            self.rate += _MEMORY * (reads.nbytes / reads.seconds - self.rate)
