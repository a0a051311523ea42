"""Seconds of reading in a step: the weights of a streamed base, while its rows are computed, and keys and
values of offloaded sequences, which its rows wait for."""

from collections.abc import Iterable

from coserve.core.plan import OffloadReads, WeightReads

_MEMORY = 0.1  # weight of one step's rate in the running mean
_OUTLIER = 4.0  # bound on the ratio of measured to predicted seconds that is learned from
_FEW = 1 << 20  # least bytes of a measurement: a rate of fewer is that of the call, not the disk's


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
        """Learns the rate from the reads of one step."""
        if reads.nbytes >= _FEW and reads.seconds > 0:
            self.rate += _MEMORY * (reads.nbytes / reads.seconds - self.rate)


class OffloadCosts:
    """Costs of reading keys and values that are not in the device's pages: learned seconds for each cached
    token, of all layers. `guess` is their first value."""

    def __init__(self, guess: float = 1e-6) -> None:
        self.token_seconds = guess
        self._known = False

    def seconds(self, tokens: int) -> float:
        """Seconds of reading so many cached tokens."""
        return tokens * self.token_seconds

    def observe(self, tokens: int, reads: OffloadReads) -> None:
        """Learns from the reads of one step. The first one replaces the guess."""
        if not tokens or reads.seconds <= 0:
            return
        taken = reads.seconds / tokens
        if self._known:
            taken = min(taken, _OUTLIER * self.token_seconds)
            taken = self.token_seconds + _MEMORY * (taken - self.token_seconds)
        self.token_seconds, self._known = taken, True
