"""Coordination of pages over the cluster (BlockLLM, 5.1): which sequences' pages move first, which move
before they are needed, and which copies are dropped."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from coserve.cluster.dispatch import Dispatch, DispatchEstimate
from coserve.cluster.records import ChainRequest, ClusterView


@dataclass(frozen=True, slots=True)
class PausedPages:
    """Pages of a request that waits for something outside of the model: since when (`paused_at`), and how
    many of its pages others read as well."""

    request: ChainRequest
    shared: int
    paused_at: float

    def resumes_at(self, now: float) -> float:
        """The time at which the pages are predicted to be read again: a pause lasts as much longer as it has
        lasted (T_INT = now - paused_at, estimated anew at each look)."""
        return resumes_at(self.paused_at, now)


@dataclass(frozen=True, slots=True)
class PagesCopy:
    """One worker's copy of a block's pages of one request: tokens that it has, passes that read it now, how
    many of its pages others read as well, and the predicted time at which the request goes on."""

    key: int
    content: str
    worker: str
    tokens: int
    readers: int = 0
    shared: int = 0
    resumes_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ProactiveMove:
    """Pages of a block that go to a worker before their request needs them there."""

    key: int
    content: str
    estimate: DispatchEstimate


def resumes_at(paused_at: float, now: float) -> float:
    """The predicted end of a pause: it lasts as much longer as it has lasted."""
    return now + (now - paused_at)


def migration_order(paused: Iterable[PausedPages], now: float) -> list[PausedPages]:
    """Sequences in the order in which their pages move: those with the fewest shared pages first, as shared
    ones would be held twice; of several those that resume first."""
    return sorted(paused, key=lambda one: (one.shared, one.resumes_at(now), one.request.key))


def proactive_moves(
    view: ClusterView, paused: Iterable[PausedPages], now: float, dispatch: Dispatch
) -> Iterator[ProactiveMove]:
    """Moves of pages whose owner is not where their request would go to, and that end before it resumes. Each
    worker receives the pages of one request at a time; a look later the next are due."""
    receiving: set[str] = set()
    for one in migration_order(paused, now):
        request = one.request
        for content in sorted(request.pages):
            owner = request.owner(content)
            if owner is None or content not in view.blocks:
                continue
            best = dispatch.choose(view, request, content, owner)
            if best is None or best.plan is None or best.worker in receiving or best.content != content:
                continue
            if best.plan.seconds <= one.resumes_at(now) - now:
                receiving.add(best.worker)
                yield ProactiveMove(request.key, content, best)


def redundant_copies(
    copies: Iterable[PagesCopy], owners: Mapping[tuple[int, str], str], open_keys: Iterable[int]
) -> list[PagesCopy]:
    """Copies that a sweep drops: those of requests that are not open, and of open ones all but the owner's.
    `owners` are the workers where requests' next rows go, by key and content; where none is known the copy
    with the most tokens stays. A copy that is read stays, and the last one of all tokens does. They are in
    the order of `sweep_order`."""
    is_open = set(open_keys)
    by_pages: dict[tuple[int, str], list[PagesCopy]] = {}
    for one in copies:
        by_pages.setdefault((one.key, one.content), []).append(one)
    found = []
    for (key, content), own in by_pages.items():
        kept = None
        if key in is_open:
            longest = max(one.tokens for one in own)
            whole = [one for one in own if one.tokens == longest]
            kept = min(whole, key=lambda one: (one.worker != owners.get((key, content)), one.worker))
        found += [one for one in own if one is not kept and not one.readers]
    return sweep_order(found)


def sweep_order(copies: Iterable[PagesCopy]) -> list[PagesCopy]:
    """Copies in the order in which they leave where room is needed: those with the fewest shared pages first,
    as others lose nothing by it, and of several those of requests that go on last."""
    return sorted(copies, key=lambda one: (one.shared, -one.resumes_at))
