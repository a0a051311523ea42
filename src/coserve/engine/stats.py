"""Statistics of an engine."""

from coserve.engine.admission import Admission
from coserve.memory.malloc import resident_bytes
from coserve.memory.pages import PagePool
from coserve.schedule.scheduler import Scheduler
from coserve.wire.messages import EngineStats, Paging


def count(
    scheduler: Scheduler, admission: Admission, pages: PagePool, paging: Paging, adapters: int
) -> EngineStats:
    """Counters since the engine's start, and where things stand now: with so many `adapters` that have a
    name. Whoever calls holds the engine's lock."""
    stats = scheduler.stats
    return EngineStats(
        steps=stats.steps,
        fused_steps=stats.fused_steps,
        decode_tokens=stats.decode_tokens,
        prefill_tokens=stats.prefill_tokens,
        trained_tokens=stats.backward_rows,
        updates=stats.updates,
        preemptions=stats.preemptions,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting) + len(scheduler.blocked_on_adapter),
        pages=pages.pages,
        free_pages=pages.free_count,
        asked_tokens=stats.asked_tokens,
        found_tokens=stats.found_tokens,
        cost_error=scheduler.cost.error,
        cost_margin=scheduler.cost.margin(scheduler.config, trains=True),
        slo_met=stats.slo_met,
        slo_missed=stats.slo_missed,
        adapters=adapters,
        resident_bytes=resident_bytes(),
        memory={account.value: nbytes for account, nbytes in admission.audit().items()},
        memory_budget=admission.ledger.budget,
        memory_peak=admission.meter.peak(),
        memory_imports=admission.imports,
        paging=paging,
    )
