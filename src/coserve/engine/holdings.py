"""Owners of an engine's pages, adapters and jobs, and reasons of requests that wait, for a page."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from coserve.adapters.paging.cache import AdapterCache
from coserve.engine.memory import JOB_OWNER, EngineMemory
from coserve.memory.pages import PagePool
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.waits import reasons
from coserve.wire.messages import Holdings

_MOST: Final = 256  # owners of one kind that are told, those with most


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
