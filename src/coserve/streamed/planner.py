"""Decides which blocks of a base stay in memory when not all of them fit.

Every pass visits all blocks in order, forward or back. Of a cyclic order a cache that keeps what was used
last finds nothing, so blocks stay for good, or are read in every pass: bytes read in a pass are those of the
blocks that do not stay. These pass through a ring of buffers, each as large as the largest of them. A buffer
more than two saves a block's bytes only where a pass turns; a block that stays saves them in every pass.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from coserve.core.size import show_size
from coserve.errors import ConfigError

RING: Final = 2  # buffers: one is computed with while the other is read
_MOST: Final = 5_000  # sums of sizes that are tried; models have one size of blocks, or a few
_Sum = tuple[int, int, "_Sum | None"]


@dataclass(frozen=True, slots=True)
class ResidencePlan:
    """`resident` are the places of blocks that stay, `buffers` the number of buffers for the others, of
    `buffer_nbytes` each, and `read_nbytes` what a pass reads."""

    resident: frozenset[int]
    buffers: int
    buffer_nbytes: int
    read_nbytes: int


@dataclass(frozen=True, slots=True)
class Streaming:
    """Way in which a base is streamed: `plan` says which blocks stay, `resident_nbytes` are the base's bytes
    in memory (ends, blocks that stay and buffers); a pass reads at `rate` bytes a second, as measured or
    assumed."""

    plan: ResidencePlan
    resident_nbytes: int
    rate: float

    @property
    def seconds(self) -> float:
        """A pass takes at least as long."""
        return self.plan.read_nbytes / self.rate if self.plan.read_nbytes else 0.0

    def __str__(self) -> str:
        if not self.plan.read_nbytes:
            return "all blocks of the base stay in memory"
        return (
            f"the base is streamed: {len(self.plan.resident)} of its blocks stay in memory, "
            f"{show_size(self.resident_nbytes)} of the base in all, and a pass reads "
            f"{show_size(self.plan.read_nbytes)} at {show_size(self.rate)}/s, in {self.seconds:.2g} s or more"
        )


def least_bytes(blocks: Sequence[int], buffers: int = RING) -> int:
    """The smallest budget for blocks of these bytes: larger ones may stay, so that the buffers are small."""
    everything = sum(blocks)
    sizes = sorted(set(blocks))
    return min([everything, *(sum(b for b in blocks if b > size) + buffers * size for size in sizes)])


def refuse_too_little(
    blocks: Sequence[int], ends: int, budget: int, stored: Sequence[int] | None = None
) -> None:
    """Raises ConfigError for a budget in which no base of these blocks, with `ends` bytes around them, can be
    streamed. The error has the smallest budget that can; blocks have up to `stored` bytes once they are
    aligned, where that is not known yet."""
    if budget < ends + least_bytes(blocks):
        least = ends + least_bytes(blocks if stored is None else stored)
        raise ConfigError(
            f"engine.base_memory: {show_size(budget)} are too few for this base, of which embeddings, head "
            f"and final norm ({show_size(ends)}) stay and two blocks of up to {show_size(max(blocks))} "
            f"pass through: at least {show_size(least, up=True)} are needed"
        )


def plan_residence(blocks: Sequence[int], budget: int, buffers: int = RING) -> ResidencePlan:
    """The plan that reads least: `blocks` are bytes in the order of the chain. Raises ConfigError for a
    budget below `least_bytes`.

    Blocks that do not stay are spread over the chain, so that the next one is read while those that stay
    compute.
    """
    if sum(blocks) <= budget:
        return ResidencePlan(frozenset(range(len(blocks))), 0, 0, 0)
    best: ResidencePlan | None = None
    for size in sorted(set(blocks)):  # of a buffer
        must = {place for place, nbytes in enumerate(blocks) if nbytes > size}
        room = budget - buffers * size - sum(blocks[place] for place in must)
        if room < 0:
            continue
        counts = Counter(nbytes for place, nbytes in enumerate(blocks) if place not in must)
        stay = _fill(counts, room)
        resident = frozenset(must).union(*(_spread(blocks, nbytes, n) for nbytes, n in stay.items()))
        left = sum(nbytes for place, nbytes in enumerate(blocks) if place not in resident)
        if best is None or left < best.read_nbytes:
            best = ResidencePlan(resident, buffers, size, left)
    if best is None:
        raise ConfigError(
            f"{show_size(budget)} are too few for {len(blocks)} blocks of up to {show_size(max(blocks))}: "
            f"at least {show_size(least_bytes(blocks, buffers), up=True)} are needed"
        )
    return best


def held_in_host(blocks: Sequence[int], host_memory: int) -> frozenset[int]:
    """Places, among blocks that do not stay on a GPU, of those in the host's memory; the others are read from
    files, while these are copied."""
    return plan_residence(blocks, host_memory, buffers=0).resident


def pass_rate(blocks: Sequence[int], held: Collection[int], link: float, disk: float) -> float:
    """Bytes a second at which a pass has blocks of these bytes: from files at `disk` and over a GPU's `link`,
    those in `held` over the link alone."""
    if not held or not sum(blocks):
        return min(link, disk)
    rates = (link if number in held else min(link, disk) for number in range(len(blocks)))
    return sum(blocks) / sum(nbytes / rate for nbytes, rate in zip(blocks, rates, strict=True))


def _fill(counts: Counter[int], room: int) -> dict[int, int]:
    """Number of blocks of each size that stay, so that they fill most of the room."""
    # Each sum with the size that was added last, how often, and the sum before.
    sums: dict[int, _Sum | None] = {0: None}
    for size, most in counts.items():
        for before, added in [*sums.items()]:
            for total in range(before + size, min(before + most * size, room) + 1, size):
                if total not in sums:
                    sums[total] = (size, (total - before) // size, added)
        if len(sums) > _MOST:
            sums = {total: sums[total] for total in nlargest(_MOST, sums)}
    stay: dict[int, int] = {}
    last = sums[max(sums)]
    while last is not None:
        size, count, last = last
        stay[size] = count
    return stay


def _spread(blocks: Sequence[int], size: int, stay: int) -> set[int]:
    """Places of `stay` of the blocks of one size; the others are at equal distances."""
    places = [place for place, nbytes in enumerate(blocks) if nbytes == size]
    go = len(places) - stay
    return {*places} - {places[(2 * i + 1) * len(places) // (2 * go)] for i in range(go)}
