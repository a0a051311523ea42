"""Where an engine stands, in numbers."""

from typing import TYPE_CHECKING

from coserve.memory.malloc import resident_bytes
from coserve.memory.pages import PagePool
from coserve.wire.messages import Stats

if TYPE_CHECKING:
    from coserve.engine.engine import Engine


def count(engine: "Engine", pages: PagePool) -> Stats:
    """Counters since the engine's start, and where things stand now. Whoever calls holds its lock."""
    counted, scheduler, admission = engine.scheduler.stats, engine.scheduler, engine.admission
    return Stats(
        steps=counted.steps,
        fused_steps=counted.fused_steps,
        decode_tokens=counted.decode_tokens,
        prefill_tokens=counted.prefill_tokens,
        trained_tokens=counted.backward_rows,
        updates=counted.updates,
        preemptions=counted.preemptions,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting) + len(scheduler.kept),
        pages=pages.pages,
        free_pages=pages.free_count,
        asked_tokens=counted.asked_tokens,
        found_tokens=counted.found_tokens,
        cost_error=scheduler.cost.error,
        cost_margin=scheduler.cost.margin(scheduler.config, trains=True),
        slo_met=counted.slo_met,
        slo_missed=counted.slo_missed,
        adapters=len(engine.bank),
        resident_bytes=resident_bytes(),
        memory={account.value: nbytes for account, nbytes in admission.audit().items()},
        memory_budget=admission.ledger.budget,
        memory_peak=admission.meter.peak(),
        memory_imports=admission.imports,
        paging=engine.stored.stats(),
    )
