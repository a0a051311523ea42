"""Answers that have no token yet, by tenant, and why each of them waits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, Final

from coserve.serve.answering.call import Call
from coserve.serve.answering.fair import FairQueue, Ticket
from coserve.serve.engine.link import EngineLink, why_absent
from coserve.serve.store.records import Tenant

MOST_SHOWN: Final = 32  # waiting answers of a tenant, the oldest


@dataclass(slots=True, eq=False)
class WaitingAnswer:
    """One answer, from its place in the queue to its first token."""

    call: Call
    id: str
    ticket: Ticket
    began: float


class AnswerWaits:
    """All answers without a token. For one event loop."""

    def __init__(self, queue: FairQueue, link: EngineLink) -> None:
        self._queue, self._link = queue, link
        self._waiting: dict[str, dict[str, WaitingAnswer]] = {}  # by tenant and id, the oldest first

    @contextmanager
    def of(self, call: Call, id: str, ticket: Ticket) -> Iterator[WaitingAnswer]:
        """Context in which an answer is made; `arrived` tells of its first token."""
        waiting = WaitingAnswer(call, id, ticket, time.monotonic())
        self._waiting.setdefault(call.tenant.id, {})[id] = waiting
        try:
            yield waiting
        finally:
            self.arrived(waiting)

    def arrived(self, waiting: WaitingAnswer) -> None:
        """Notes that an answer waits no longer; repeated calls are ignored."""
        tenant = waiting.call.tenant.id
        if (own := self._waiting.get(tenant)) is not None:
            own.pop(waiting.id, None)
            if not own:
                del self._waiting[tenant]

    def rows(self, tenant: Tenant) -> list[dict[str, Any]]:
        """The tenant's oldest waiting answers, with seconds and reasons."""
        own, now = self._waiting.get(tenant.id, {}), time.monotonic()
        places = {ticket: place for place, ticket in enumerate(self._queue.line(tenant, MOST_SHOWN), 1)}
        return [
            {
                "id": one.id,
                "model": one.call.model.name,
                "prompt": len(one.call.prompts[0]),
                "seconds": round(now - one.began, 1),
                "why": self._why(one, places.get(one.ticket)),
            }
            for one in nsmallest(MOST_SHOWN, own.values(), key=lambda one: one.began)
        ]

    def _why(self, waiting: WaitingAnswer, place: int | None) -> str:
        """The reason of an answer that waits, whose `place` is that among the tenant's first ones before the
        engine."""
        if not self._link.ready:
            return why_absent(self._link.hello)
        if not waiting.ticket.is_in and not waiting.ticket.is_beside:
            where = f"place {place} of your queue" if place else "your queue"
            return f"{where}: {self._queue.why()}"
        stats = self._link.stats
        told = None if stats is None else stats.holdings.waits.get(waiting.id)
        return told or "the engine reads its prompt"
