"""Records of a cluster, as its scheduler and its agents see it: workers, links, blocks and their instances,
and requests on their way. Policies read these and nothing else; they have no clock, no torch and no
transport.

Bytes are counted, seconds are predicted from measured rates, and rows are those of one pass through a block.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from coserve.core.ranges import LARGEST, MOST_COUNT, SMALLEST, check_range
from coserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """Seconds of a block's pass by its rows: (rows, seconds) as measured, ascending in both. Between two the
    seconds are interpolated; beyond the last they go on with the last slope, and below the first they are the
    first's, as a pass of few rows reads the block's weights all the same."""

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("a compute profile needs at least one measured number of rows")
        for rows, seconds in self.points:
            check_range("rows of a compute profile", rows, 1, MOST_COUNT, int)
            check_range("seconds of a compute profile", seconds, 0.0, LARGEST)
        if any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(self.points)):
            raise ConfigError("rows of a compute profile must ascend, and seconds must not fall")

    def seconds(self, rows: int) -> float:
        """Seconds of a pass of so many rows; none without rows."""
        if rows <= 0:
            return 0.0
        at = bisect_left(self.points, (rows, 0.0))
        if at == 0:
            return self.points[0][1]
        if at == len(self.points) == 1:
            return self.points[0][1] * rows / self.points[0][0]
        (x, y), (u, v) = self.points[at - 1 : at + 1] if at < len(self.points) else self.points[-2:]
        return y + (v - y) * (rows - x) / (u - x)


@dataclass(frozen=True, slots=True)
class ClusterLink:
    """A link in one direction: bytes a second, and the seconds until the first of them is there."""

    rate: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        check_range("rate of a link", self.rate, SMALLEST, LARGEST)
        check_range("latency of a link", self.latency, 0.0, LARGEST)

    def seconds(self, nbytes: float) -> float:
        """Seconds in which so many bytes arrive; none where nothing is sent."""
        return self.latency + nbytes / self.rate if nbytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ClusterWorker:
    """A worker with a device. `host` names the machine that it shares with others, `memory` are bytes of its
    device and `used` those taken; `memory_rate` is how fast blocks move out of it, in bytes a second, and
    `load_rate` how fast they come in. `recompute_rate` are tokens a second at which it makes pages of one
    block anew, beside its other work, as last measured."""

    name: str
    host: str
    memory: int
    used: int
    memory_rate: float
    load_rate: float
    recompute_rate: float
    is_alive: bool = True

    @property
    def free(self) -> int:
        """Bytes that are not taken."""
        return max(self.memory - self.used, 0)


@dataclass(frozen=True, slots=True)
class ClusterBlock:
    """A block by the hash of its whole content: bytes of its weights, of the keys and values of one token in
    it, and of one row on its way to it; its seconds by rows. `input_nbytes` are those of a token's input,
    which recomputing its pages needs from who has these; 0 where the tokens themselves are enough.
    `equivalents` are blocks that may stand in for it, with their similarity, where a request allows that."""

    content: str
    nbytes: int
    token_nbytes: int
    row_nbytes: int
    profile: ComputeProfile
    input_nbytes: int = 0
    equivalents: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class BlockInstance:
    """A block in a worker's memory: rows of the batches in its queue in order, the most rows of a pass, and
    the most rows that may wait. `idle_since` is when its queue was last empty and stayed so, None while it
    has work."""

    worker: str
    content: str
    queue: tuple[int, ...] = ()
    batch_rows: int = 1
    most_queued: int = 1
    idle_since: float | None = None

    @property
    def queued_rows(self) -> int:
        """Rows of all batches in the queue."""
        return sum(self.queue)


@dataclass(frozen=True, slots=True)
class ChainRequest:
    """A request on its way through its chain: tokens whose pages exist, and rows that are computed next.
    `pages` are, by the content of a block and by worker, the tokens of which that worker holds the block's
    pages: those from the front on. `approximates` tells whether equivalent blocks may answer it."""

    key: int
    tokens: int
    rows: int
    pages: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    approximates: bool = False

    def held(self, content: str, worker: str) -> int:
        """Tokens of which a worker holds a block's pages."""
        return min(self.pages.get(content, {}).get(worker, 0), self.tokens)

    def owner(self, content: str) -> str | None:
        """The worker that holds all of a block's pages; of several the first by name, None where none
        does."""
        holders = self.pages.get(content, {})
        whole = [worker for worker, tokens in holders.items() if tokens >= self.tokens]
        return min(whole, default=None) if self.tokens else None


@dataclass(frozen=True)
class ClusterView:
    """The cluster as a scheduler or an agent knows it. `links` are by sender and receiver; two workers
    without one do not reach each other. The scheduler is a sender, too."""

    workers: Mapping[str, ClusterWorker]
    blocks: Mapping[str, ClusterBlock]
    instances: tuple[BlockInstance, ...]
    links: Mapping[tuple[str, str], ClusterLink]

    @cached_property
    def by_place(self) -> dict[tuple[str, str], BlockInstance]:
        """Instances by worker and content: a worker has one of a block at most."""
        return {(one.worker, one.content): one for one in self.instances}

    @cached_property
    def by_worker(self) -> dict[str, list[BlockInstance]]:
        """Instances by worker."""
        found: dict[str, list[BlockInstance]] = {}
        for one in self.instances:
            found.setdefault(one.worker, []).append(one)
        return found

    @cached_property
    def queue_seconds(self) -> dict[str, float]:
        """Seconds of all batches that wait at each worker: its device computes one after the other, whichever
        instance they wait for."""
        return {
            name: sum(
                self.blocks[one.content].profile.seconds(rows)
                for one in self.by_worker.get(name, ())
                for rows in one.queue
            )
            for name in self.workers
        }

    def reaches(self, sender: str, receiver: str) -> bool:
        """Tells whether bytes can go from one to another, which is alive."""
        there = self.workers.get(receiver)
        return (
            there is not None and there.is_alive and (sender == receiver or (sender, receiver) in self.links)
        )

    def sent_seconds(self, sender: str, receiver: str, nbytes: float) -> float:
        """Seconds in which bytes go from one to another; infinite without a link between them."""
        if sender == receiver:
            return 0.0
        link = self.links.get((sender, receiver))
        return float("inf") if link is None else link.seconds(nbytes)
