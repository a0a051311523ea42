"""The choice between an adapter and its approximations, for a request that allows these (BlockLLM, 5.3).

The exact version answers unless the engine is under load: all places for sequences are taken, a request has
waited too long for one, or the version's weights would displace others' or wait for theirs. Under load the
most accurate version answers whose delay is within a bound; where there is none, the one with the least
delay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VersionOutlook:
    """A version's part in a request's latency.

    `load` is the seconds until its weights are on the device, infinite where answers of other versions have
    to end first. `compute` is the seconds that its modules add to the steps of the answer, beyond those of
    the version with the fewest. It `displaces` others if some leave the device for it, or are read first.
    """

    load: float = 0.0
    compute: float = 0.0
    displaces: bool = False


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The load of an engine when a request comes: `taken` of its `places` for sequences, and the seconds that
    the first in the waiting line has `waited` for one."""

    taken: int
    places: int
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class ApproximationRule:
    """The rule, with a `bound` on delays in seconds."""

    bound: float

    def choose(self, versions: Sequence[VersionOutlook], load: StepLoad) -> int:
        """The index of the version that answers. The first is the exact one, the others follow by
        accuracy."""
        is_full = load.taken + 1 >= load.places or load.waited > self.bound
        exact = versions[0]
        if not is_full and not exact.displaces and math.isfinite(exact.load):
            return 0
        delays = [each.load + (each.compute if is_full else 0.0) for each in versions]
        within = (index for index, delay in enumerate(delays) if delay <= self.bound)
        return next(within, min(range(len(delays)), key=delays.__getitem__))
