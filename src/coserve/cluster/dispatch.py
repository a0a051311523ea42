"""Dispatch of requests to instances of blocks (BlockLLM, 5.3): the latency that a candidate would add, and
the choice among candidates.

    latency = queue + compute + transfer + load

| part | seconds |
|---|---|
| queue | of all batches that wait at the worker |
| compute | of the request's rows in the candidate's block |
| transfer | of the rows, and of the pages that the worker lacks; the scheduler's first dispatch has none |
| load | none where the block is there; else the swap, less the transfer that hides it on an idle worker |

The scheduler has a live record of the cluster. An agent knows what it has heard and does its best with that:
it leaves records out that are too old, and gives the request to the scheduler where it knows no candidate.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from coserve.cluster.meeting import MeetingPlan, MovingPages, PageMove, plan_move
from coserve.cluster.records import BlockInstance, ChainRequest, ClusterBlock, ClusterView, ClusterWorker
from coserve.core.ranges import LARGEST, MOST_COUNT, check_range

SCHEDULER: Final = ""  # the sender of requests that come to the first block of a chain
EQUIVALENT: Final = 0.98  # similarity from which a block may stand in for another (7.1)
_NOWHERE: Final = float("inf")


class DispatchRule(StrEnum):
    """The rules of choice: the least latency, owners of pages first where queues are alike; the shortest
    queue; either of these with one way alone of getting pages (figure 24)."""

    OWNER_FIRST = "owner_first"
    LEAST_BUSY = "least_busy"
    RECOMPUTE_ONLY = "recompute_only"
    COPY_ONLY = "copy_only"


WAYS: Final = {
    DispatchRule.OWNER_FIRST: MovingPages.MEET,
    DispatchRule.LEAST_BUSY: MovingPages.COPY,
    DispatchRule.RECOMPUTE_ONLY: MovingPages.RECOMPUTE,
    DispatchRule.COPY_ONLY: MovingPages.COPY,
}


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """`page` are tokens of a page. An owner's queue is *alike* where it takes, with the way of the request's
    rows, at most `alike` times the seconds of their pass longer than the shortest: an owner behind a slow
    link is none."""

    page: int = 16
    rule: DispatchRule = DispatchRule.OWNER_FIRST
    alike: float = 1.0
    least_similarity: float = EQUIVALENT
    loads: bool = True

    def __post_init__(self) -> None:
        check_range("page", self.page, 1, MOST_COUNT, int)
        check_range("alike", self.alike, 0.0, LARGEST)
        check_range("least_similarity", self.least_similarity, -1.0, 1.0)


@dataclass(frozen=True, slots=True)
class DispatchEstimate:
    """A candidate and the seconds that it would add. `content` is the block that would compute, `evicted` the
    contents that make room for it, and `plan` how missing pages come from `source`; None without any."""

    worker: str
    content: str
    queue: float
    compute: float
    transfer: float
    load: float
    holds_pages: bool
    source: str | None = None
    plan: MeetingPlan | None = None
    evicted: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds until the request has passed the block."""
        return self.queue + self.compute + self.transfer + self.load

    @property
    def wait(self) -> float:
        """Seconds until the request's rows are computed if its pages are there: the queue, and their way."""
        return self.queue + self.transfer - (0.0 if self.plan is None else self.plan.seconds)


class Dispatch:
    """Chooses instances. A request's pages of one block are of no use to another, equivalent or not: there
    they are recomputed."""

    def __init__(self, settings: DispatchSettings = DispatchSettings()) -> None:
        self.settings = settings

    def choose(
        self, view: ClusterView, request: ChainRequest, content: str, sender: str = SCHEDULER
    ) -> DispatchEstimate | None:
        """The scheduler's choice for a block of a request that is at `sender` now; None where no worker that
        can be reached has the block or room for it. The block of the chain is preferred to an equivalent, and
        of two workers the first by name."""
        found = [*self.candidates(view, request, content, sender)]
        if not found:
            return None

        def order(one: DispatchEstimate) -> tuple[float, bool, str]:
            return one.seconds, one.content != content, one.worker

        if self.settings.rule is DispatchRule.LEAST_BUSY:
            return min(found, key=lambda one: (one.load, one.queue, *order(one)))
        best = min(found, key=order)
        owners = [one for one in found if one.holds_pages and one.content == content]
        if self.settings.rule is DispatchRule.OWNER_FIRST and owners:
            owner = min(owners, key=order)
            if owner.wait <= min(one.wait for one in found) + self.settings.alike * owner.compute:
                return owner
        return best

    def candidates(
        self, view: ClusterView, request: ChainRequest, content: str, sender: str = SCHEDULER
    ) -> Iterator[DispatchEstimate]:
        """Estimates of all workers for the block of the chain and, where the request allows them, for its
        equivalents."""
        block = view.blocks[content]
        contents = [content]
        if request.approximates:
            least = self.settings.least_similarity
            contents += [other for other, similarity in block.equivalents if similarity >= least]
        for one in contents:
            for worker in view.workers:
                is_loaded = self.settings.loads and one == content  # an equivalent is not loaded for this
                if is_loaded or (worker, one) in view.by_place:
                    estimate = self.estimate(view, request, one, worker, sender)
                    if estimate is not None and estimate.seconds < _NOWHERE:
                        yield estimate

    def estimate(
        self, view: ClusterView, request: ChainRequest, content: str, worker: str, sender: str = SCHEDULER
    ) -> DispatchEstimate | None:
        """The estimate for one block on one worker; None for a worker that is dead, out of reach, without
        room for the request's pages or for the block, or whose queue is full."""
        block, there = view.blocks[content], view.workers[worker]
        if not view.reaches(sender, worker):
            return None
        lacks = request.tokens - request.held(content, worker) // self.settings.page * self.settings.page
        lacks = 0 if request.held(content, worker) == request.tokens else lacks
        instance = view.by_place.get((worker, content))
        is_full = instance is not None and instance.queued_rows + request.rows > instance.most_queued
        if is_full and (lacks or not request.tokens):  # who has pages there is let in
            return None
        evicted = _evicted(view, there, block, (lacks + request.rows) * block.token_nbytes)
        if evicted is None:
            return None
        transfer = view.sent_seconds(sender, worker, request.rows * block.row_nbytes)
        source, plan = None, None
        if lacks:
            source, plan = self._pages(view, request, block, there, lacks)
            transfer += plan.seconds
        queue = view.queue_seconds[worker]
        load = 0.0
        if instance is None:
            leaving = sum(view.blocks[one].nbytes for one in evicted)
            swap = leaving / there.memory_rate + block.nbytes / there.load_rate
            load = max(swap - transfer, 0.0) if queue == 0.0 else swap
        compute = block.profile.seconds(request.rows)
        return DispatchEstimate(
            worker, content, queue, compute, transfer, load, lacks == 0 and request.tokens > 0, source, plan,
            evicted,
        )  # fmt: skip

    def _pages(
        self, view: ClusterView, request: ChainRequest, block: ClusterBlock, worker: ClusterWorker, lacks: int
    ) -> tuple[str | None, MeetingPlan]:
        """The best plan for the pages that a worker lacks, and the worker that they are copied from."""
        way = WAYS[self.settings.rule]
        holders = [
            holder
            for holder, tokens in request.pages.get(block.content, {}).items()
            if tokens >= request.tokens
            and holder != worker.name
            and (at := view.workers.get(holder)) is not None
            and at.is_alive
            and (holder, worker.name) in view.links
        ]
        links = {holder: view.links[holder, worker.name] for holder in sorted(holders)}
        nbytes = lacks * block.token_nbytes
        source = min(links, key=lambda one: links[one].seconds(nbytes), default=None)
        link = None if source is None else links[source]
        move = PageMove(
            lacks, block.token_nbytes, self.settings.page, link, worker.recompute_rate, block.input_nbytes
        )
        plan = plan_move(move, way if link is not None else MovingPages.RECOMPUTE)
        return (source if plan.copied or block.input_nbytes else None), plan


def _evicted(
    view: ClusterView, worker: ClusterWorker, block: ClusterBlock, nbytes: int
) -> tuple[str, ...] | None:
    """Blocks that a worker gives up for a block and so many bytes of pages: those without work, the one that
    has been idle for longest first; None where all of them are not enough. Pages alone evict no block."""
    is_there = (worker.name, block.content) in view.by_place
    missing = nbytes + (0 if is_there else block.nbytes) - worker.free
    if missing <= 0:
        return ()
    if is_there:
        return None
    idle = [
        one for one in view.by_worker.get(worker.name, ()) if not one.queue and one.idle_since is not None
    ]
    leaving: list[BlockInstance] = []
    for one in sorted(idle, key=lambda one: (one.idle_since or 0.0, one.content)):
        leaving.append(one)
        missing -= view.blocks[one.content].nbytes
        if missing <= 0:
            return tuple(one.content for one in leaving)
    return None
