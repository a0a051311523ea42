"""Placement of blocks on workers (BlockLLM, 5.3): blocks that follow each other often are placed together.

Locality is counted: how many bytes went from one block directly to another. Blocks are placed by the heaviest
pairs first, then single moves and swaps are made as long as they save traffic. Where traffic changes,
instances move, if what that saves is worth the bytes of moving.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from coserve.cluster.records import ClusterBlock, ClusterWorker
from coserve.core.ranges import BELOW_ONE, LARGEST, check_range

Assignment = Mapping[str, str]  # contents of blocks to names of workers
# Traffic between two workers of one host, as a share of the same between hosts: its link is about so much
# faster.
WITHIN_HOST: Final = 0.05
_ROUNDS: Final = 64  # of moves and swaps, each of which saves traffic


class DependenceCounter:
    """Bytes that went directly from one block to another. Older ones count less: all are halved once
    `half_life` seconds have passed."""

    def __init__(self, half_life: float = 60.0) -> None:
        check_range("half_life", half_life, 1e-9, LARGEST)
        self._half_life = half_life
        self._bytes: dict[tuple[str, str], float] = {}
        self._at = 0.0

    def note(self, sender: str, receiver: str, nbytes: float, now: float) -> None:
        """Counts rows that went from one block to another."""
        self._fade(now)
        if sender != receiver:
            pair = min(sender, receiver), max(sender, receiver)
            self._bytes[pair] = self._bytes.get(pair, 0.0) + nbytes

    def traffic(self, now: float) -> dict[tuple[str, str], float]:
        """Bytes between pairs of blocks in either direction, as they count now."""
        self._fade(now)
        return dict(self._bytes)

    def _fade(self, now: float) -> None:
        if now > self._at:
            factor = 0.5 ** ((now - self._at) / self._half_life)
            self._bytes = {pair: n * factor for pair, n in self._bytes.items() if n * factor >= BELOW_ONE}
            self._at = now


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """`spread` is the most that a worker's share of the load may be over the mean; without a bound all blocks
    would be best on one worker. `reserve` is the share of each memory that stays free for pages. A move is
    worth it if the traffic of `horizon` half-lives that it saves is more than the bytes that move."""

    spread: float = 1.25
    reserve: float = 0.2
    horizon: float = 4.0

    def __post_init__(self) -> None:
        check_range("spread", self.spread, 1.0, LARGEST)
        check_range("reserve", self.reserve, 0.0, BELOW_ONE)
        check_range("horizon", self.horizon, 0.0, LARGEST)


@dataclass(frozen=True, slots=True)
class PlacementTask:
    """Blocks to place, workers that are there, the traffic between pairs of blocks, and the load of each
    block: seconds of computing in a second."""

    blocks: Mapping[str, ClusterBlock]
    workers: Mapping[str, ClusterWorker]
    traffic: Mapping[tuple[str, str], float]
    loads: Mapping[str, float]
    settings: PlacementSettings = PlacementSettings()

    def cost(self, placed: Assignment) -> float:
        """Bytes over links between hosts; those between workers of a host count for `WITHIN_HOST`."""
        return sum(nbytes * self._far(placed, *pair) for pair, nbytes in self.traffic.items())

    def between_hosts(self, placed: Assignment) -> float:
        """Bytes over links between hosts."""
        return sum(
            nbytes
            for (a, b), nbytes in self.traffic.items()
            if a in placed and b in placed and self.workers[placed[a]].host != self.workers[placed[b]].host
        )

    def room(self, worker: str) -> float:
        """Bytes of a worker for blocks."""
        return self.workers[worker].memory * (1.0 - self.settings.reserve)

    @property
    def most_load(self) -> float:
        """The most load of one worker: `spread` times the mean, or that of the heaviest block alone."""
        loads = [self.loads.get(one, 0.0) for one in self.blocks]
        return max(self.settings.spread * sum(loads) / max(len(self.workers), 1), max(loads, default=0.0))

    def fits(self, placed: Assignment) -> bool:
        """Tells whether all memories and loads are kept."""
        used = dict.fromkeys(self.workers, 0.0)
        loads = dict.fromkeys(self.workers, 0.0)
        for content, worker in placed.items():
            used[worker] += self.blocks[content].nbytes
            loads[worker] += self.loads.get(content, 0.0)
        most = self.most_load * (1 + 1e-9)
        return all(used[one] <= self.room(one) and loads[one] <= most for one in self.workers)

    def _far(self, placed: Assignment, a: str, b: str) -> float:
        if a not in placed or b not in placed or placed[a] == placed[b]:
            return 0.0
        return 1.0 if self.workers[placed[a]].host != self.workers[placed[b]].host else WITHIN_HOST


def place_by_locality(task: PlacementTask) -> dict[str, str] | None:
    """Blocks' workers, blocks that depend on each other close together; None where the blocks do not fit.
    The result of the heaviest pairs first and that of the least fragmentation are both improved by moves and
    swaps, and the better one counts."""
    starts = [found for found in (_by_pairs(task), place_by_fragmentation(task)) if found is not None]
    improved = [_improved(task, one) for one in starts]
    return min(improved, key=task.cost, default=None)


def place_by_fragmentation(task: PlacementTask) -> dict[str, str] | None:
    """The comparison (figure 26): each block, the largest first, goes where the least memory is left over,
    loads permitting; None where the blocks do not fit."""
    placed: dict[str, str] = {}
    free = {name: task.room(name) for name in task.workers}
    for content in sorted(task.blocks, key=lambda one: (-task.blocks[one].nbytes, one)):
        fitting = [
            one for one in sorted(free, key=lambda one: (free[one], one)) if _goes(task, placed, content, one)
        ]
        if not fitting:
            return None
        placed[content] = fitting[0]
        free[fitting[0]] -= task.blocks[content].nbytes
    return placed


def moves_between(task: PlacementTask, placed: Assignment, wanted: Assignment) -> list[tuple[str, str]]:
    """Blocks that move and where to, the most saving first, as long as each saves more traffic within the
    horizon than it moves bytes; what is placed fits after each of them."""
    now, found = dict(placed), list[tuple[str, str]]()
    while True:
        options = [
            (
                task.settings.horizon * (task.cost(now) - task.cost(now | {one: to}))
                - task.blocks[one].nbytes,
                one,
                to,
            )
            for one, to in wanted.items()
            if now.get(one) not in (None, to) and task.fits(now | {one: to})
        ]
        best = max(options, default=(0.0, "", ""))
        if best[0] <= 0.0:
            return found
        now[best[1]] = best[2]
        found.append(best[1:])


def _by_pairs(task: PlacementTask) -> dict[str, str] | None:
    """Blocks by the heaviest pairs, each where its traffic with those placed costs least."""
    order = sorted(task.traffic, key=lambda pair: (-task.traffic[pair], pair))
    contents = [one for pair in order for one in pair if one in task.blocks]
    placed: dict[str, str] = {}
    loads = dict.fromkeys(task.workers, 0.0)
    for content in dict.fromkeys([*contents, *sorted(task.blocks)]):
        fitting = [one for one in task.workers if _goes(task, placed, content, one)]
        if not fitting:
            return None
        placed[content] = min(fitting, key=lambda one: (task.cost(placed | {content: one}), loads[one], one))
        loads[placed[content]] += task.loads.get(content, 0.0)
    return placed


def _improved(task: PlacementTask, placed: dict[str, str]) -> dict[str, str]:
    for _ in range(_ROUNDS):
        before = task.cost(placed)
        options = [
            other for other in _neighbours(task, placed) if task.cost(other) < before and task.fits(other)
        ]
        if not options:
            break
        placed = min(options, key=lambda one: (task.cost(one), sorted(one.items())))
    return placed


def _neighbours(task: PlacementTask, placed: dict[str, str]) -> Iterator[dict[str, str]]:
    """Placements with one block elsewhere, two in each other's place, two of a pair elsewhere together, or
    all blocks of two workers in each other's place."""
    contents: Sequence[str] = sorted(placed)
    for one in contents:
        yield from (placed | {one: worker} for worker in task.workers if worker != placed[one])
    for one, other in combinations(contents, 2):
        if placed[one] != placed[other]:
            yield placed | {one: placed[other], other: placed[one]}
    for one, other in task.traffic:
        if one in placed and other in placed:
            yield from (placed | {one: worker, other: worker} for worker in task.workers)
    for one, other in combinations(sorted(task.workers), 2):
        turned = {one: other, other: one}
        yield {content: turned.get(worker, worker) for content, worker in placed.items()}


def _goes(task: PlacementTask, placed: Assignment, content: str, worker: str) -> bool:
    """Tells whether a worker has room for one more block."""
    return task.fits({**placed, content: worker})
