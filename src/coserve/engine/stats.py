"""Where an engine stands, in numbers."""

from typing import TYPE_CHECKING

from coserve.memory.malloc import resident_bytes
from coserve.memory.pages import PagePool
from coserve.wire.messages import Stats

if TYPE_CHECKING:
    from coserve.engine.engine import Engine


def count(engine: "Engine", pages: PagePool) -> Stats:
    """Counters since the engine's start, and where things stand now. Whoever calls holds its lock."""
    stats, scheduler, admission = engine.scheduler.stats, engine.scheduler, engine.admission
    return Stats(
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
        adapters=len(engine.bank),
        resident_bytes=resident_bytes(),
        memory={account.value: nbytes for account, nbytes in admission.audit().items()},
        memory_budget=admission.ledger.budget,
        memory_peak=admission.meter.peak(),
        memory_imports=admission.imports,
        paging=engine.stored.stats(),
    )
