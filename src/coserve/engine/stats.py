"""Statistics of an engine."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from coserve.adapters.paging.cache import AdapterCache
from coserve.engine.memory import JOB_OWNER, EngineMemory
from coserve.memory.pages import PagePool
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.waits import reasons
from coserve.wire.messages import EngineStats, Holdings

_MOST: Final = 256  # owners of one kind that are told, those with most


def count(
    scheduler: Scheduler,
    memory: EngineMemory,
    pages: Collection[PagePool],
    cache: AdapterCache,
    workers: Sequence[str] = (),
) -> EngineStats:
    """Counters since the engine's start, and its current state, over all its bases, whose `pages` are given,
    and what the `workers` of a cluster do.
    The caller holds the engine's lock. Pages of the second tier are counted in those of the first base."""
    stats, requests = scheduler.stats, scheduler.requests
    first, caches = scheduler.caches.first, [scheduler.caches[base] for base in scheduler.caches]
    counters = {name: getattr(stats, name) for name in EngineStats.__struct_fields__ if hasattr(stats, name)}
    return EngineStats(
        **counters,
        trained_tokens=stats.backward_rows,
        prefix_pages_swapped_out=sum(one.prefixes.swapped.written for one in caches),
        prefix_pages_swapped_in=sum(one.prefixes.swapped.read for one in caches),
        swap_pages=first.swapping.copies.pages,
        swap_pages_used=-(-scheduler.tier.used // first.swapping.copies.page_nbytes),
        offloaded_pages=first.offloading.pages,
        offloaded_pages_used=round(sum(one.offloading.used_share for one in caches) * first.offloading.pages),
        running=len(requests.running),
        waiting=len(requests.waiting) + len(requests.blocked_on_adapter),
        pages=sum(pool.pages for pool in pages),
        free_pages=sum(pool.free_count for pool in pages),
        cost_error=scheduler.cost.error,
        cost_margin=scheduler.cost.margin(scheduler.config, trains=True),
        adapters=len(cache),
        memory={account.value: nbytes for account, nbytes in memory.audit().items()},
        memory_budget=memory.ledger.budget,
        memory_peak=memory.meter.peak(),
        memory_imports=memory.imports,
        paging=cache.stats(),
        holdings=holdings_of(scheduler, memory, pages, cache),
        workers=tuple(workers),
    )


def holdings_of(
    scheduler: Scheduler, memory: EngineMemory, pages: Collection[PagePool], cache: AdapterCache
) -> Holdings:
    """The holdings of all bases. The caller holds the engine's lock."""
    queues, ledger = scheduler.requests.queues, memory.ledger
    own = Counter[str]()
    for sequence in queues.running:
        own[sequence.request.scope or ""] += len(sequence.pages)
    caches = [scheduler.caches[base] for base in scheduler.caches]
    kept = [one.prefixes.states for one in caches if one.prefixes.states is not None]
    recurrent = memory.recurrent_bases
    return Holdings(
        waits=dict(reasons(queues, scheduler.held)),
        pages=dict(own.most_common(_MOST)),
        cached_pages=sum(pool.cached_count for pool in pages),
        states=len(recurrent) * scheduler.config.max_running,
        states_used=sum(sequence.request.base in recurrent for sequence in queues.running),
        kept_states=sum(one.slots for one in kept),
        kept_states_used=sum(map(len, kept)),
        adapters=_most(cache.bytes_by_name()),
        jobs=_most({name.removeprefix(JOB_OWNER): ledger.of(name) for name in ledger.owners(JOB_OWNER)}),
    )


def _most(nbytes: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(nbytes).most_common(_MOST))
