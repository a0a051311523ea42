"""Statistics of an engine."""

from collections.abc import Collection, Sequence

from coserve.adapters.paging.cache import AdapterCache
from coserve.engine.holdings import holdings_of
from coserve.engine.memory import EngineMemory
from coserve.memory.malloc import resident_bytes
from coserve.memory.pages import PagePool
from coserve.schedule.scheduler import Scheduler
from coserve.wire.messages import EngineStats


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
    return EngineStats(
        steps=stats.steps,
        fused_steps=stats.fused_steps,
        decode_tokens=stats.decode_tokens,
        prefill_tokens=stats.prefill_tokens,
        trained_tokens=stats.backward_rows,
        updates=stats.updates,
        preemptions=stats.preemptions,
        swapped_out_pages=stats.swapped_out_pages,
        swapped_in_pages=stats.swapped_in_pages,
        swap_failures=stats.swap_failures,
        prefix_pages_swapped_out=sum(one.prefixes.swapped.written for one in caches),
        prefix_pages_swapped_in=sum(one.prefixes.swapped.read for one in caches),
        swap_pages=first.swapping.copies.pages,
        swap_pages_used=-(-scheduler.tier.used // first.swapping.copies.page_nbytes),
        offloaded_pages=first.offloading.pages,
        offloaded_pages_used=round(sum(one.offloading.used_share for one in caches) * first.offloading.pages),
        offloaded_read_bytes=stats.offloaded_read_bytes,
        offload_failures=stats.offload_failures,
        recomputed_tokens=stats.recomputed_tokens,
        running=len(requests.running),
        waiting=len(requests.waiting) + len(requests.blocked_on_adapter),
        pages=sum(pool.pages for pool in pages),
        free_pages=sum(pool.free_count for pool in pages),
        asked_tokens=stats.asked_tokens,
        found_tokens=stats.found_tokens,
        cost_error=scheduler.cost.error,
        cost_margin=scheduler.cost.margin(scheduler.config, trains=True),
        answer_seconds=stats.answer_seconds,
        answer_deferred_seconds=stats.answer_deferred_seconds,
        slowdown=stats.slowdown,
        slo_met=stats.slo_met,
        slo_missed=stats.slo_missed,
        adapters=len(cache),
        resident_bytes=resident_bytes(),
        memory={account.value: nbytes for account, nbytes in memory.audit().items()},
        memory_budget=memory.ledger.budget,
        memory_peak=memory.meter.peak(),
        memory_imports=memory.imports,
        paging=cache.stats(),
        holdings=holdings_of(scheduler, memory, pages, cache),
        workers=tuple(workers),
    )
