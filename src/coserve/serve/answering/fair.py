"""The fair queue before the engine: orders tenants' requests when more wait than the engine runs at once.

Virtual token counters ("Fairness in Serving Large Language Models", OSDI 2024): each tenant's counter grows
with the work done for it, divided by its weight, and the tenant whose counter is lowest goes first. Trained
tokens count as well as answered ones. A returning tenant's counter is raised to the lowest of the active
ones, so that idle time gives no credit; and no counter is ahead by more than `HORIZON`, so that long training
on an idle machine does not penalise its owner for long.

Admission alone does not determine when the engine computes a request: those of a tenant with no more work
done than others and few places are marked as a newcomer's, and the engine gives their first token priority.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from itertools import count
from time import monotonic

from coserve.serve.errors import ApiError
from coserve.serve.settings import TIERS
from coserve.serve.store.records import Tenant

HORIZON = 50_000.0  # tokens
_CHARGED_AT_ONCE = 32.0  # tokens
_AHEAD = 512.0  # tokens that a newcomer's tenant may have had beyond the others: some prompts at once
_FEW = 0.5  # share of its places that a newcomer's tenant may hold
_LONGEST_WAIT, _MEMORY = (
    60,
    0.1,
)  # seconds told to come back after; weight of the newest pause between two ends


@dataclass(slots=True, eq=False)
class Ticket:
    """One sequence's place in the queue, then in the engine."""

    line: "_Line"
    queue: "FairQueue"
    entered: asyncio.Future[None]
    prompt_cost: float  # charged on admission, so that no tenant takes all free places at once
    is_in: bool = False
    is_gone: bool = False
    is_newcomer: bool = False  # decided on admission
    owed: float = 0.0
    is_beside: bool = False  # in the background, which nothing is charged for

    async def admitted(self) -> None:
        """Waits until the sequence may enter the engine."""
        await self.entered

    def served(self, cost: float) -> None:
        """Charges work done for this sequence to its tenant."""
        if self.is_beside:
            return
        self.owed += cost
        if self.owed >= _CHARGED_AT_ONCE or self.is_gone:
            self.queue.charge(self.line.tenant, self.owed)
            self.owed = 0.0


@dataclass(slots=True, eq=False)
class _Line:
    """One tenant's tickets. `counter` is the work done for the tenant divided by its weight."""

    tenant: Tenant
    counter: float = 0.0
    waiting: list[tuple[int, int, Ticket]] = field(default_factory=list)  # heap: tier, order of arrival
    inside: int = 0
    jobs: set[str] = field(default_factory=set)  # that train

    @property
    def is_active(self) -> bool:
        return bool(self.waiting) or self.inside > 0

    @property
    def has_work(self) -> bool:
        return self.is_active or bool(self.jobs)


class FairQueue:
    """Bounded queues before the engine, one for each tenant. For one event loop.

    `resize` sets how many sequences the engine runs. With more than one known tenant some places are reserved
    for tenants without any, so that a newcomer never waits for another's backlog.
    """

    def __init__(self, most: int, most_tenant: int, clock: Callable[[], float] = monotonic) -> None:
        self._most, self._most_tenant, self._clock = most, most_tenant, clock
        self._lines: dict[str, _Line] = {}
        self._order = count()
        self._running = self._spare = self._reserve = 0
        self._left = 0.0
        self._pause, self._ended = 0.0, clock()
        self.waiting = 0
        self.inside = 0

    def limit(self, most: int, most_tenant: int) -> None:
        """Changes how many sequences may wait, of all tenants and of one. Those that wait already stay."""
        self._most, self._most_tenant = most, most_tenant

    def resize(self, running: int) -> None:
        """Sets the number of sequences that the engine runs at once; a few more are admitted, to fill
        gaps."""
        self._running, self._spare = running, max(1, running // 16)
        self._reserve = self._spare + (max(1, running // 8) if running >= 4 else 0)
        self._admit()

    def check(self, under_way: int, of_tenant: int) -> None:
        """Raises ApiError 429 where the queue has no room for another request, given `under_way` requests in
        all and `of_tenant` of its tenant. For use before the request is read."""
        places = self._running + self._spare
        if of_tenant >= self._most_tenant + places or under_way >= self._most + places:
            raise self._full()

    def know(self, tenant: Tenant) -> None:
        """Adds a tenant, or changes its weight."""
        self._line(tenant)

    @contextmanager
    def enter(
        self, tenant: Tenant, prompt_costs: Sequence[float], tier: str = "default"
    ) -> Iterator[list[Ticket]]:
        """Context with tickets for all sequences of a request. Raises ApiError 429 where the queue is
        full."""
        line, sequences = self._line(tenant), len(prompt_costs)
        if len(line.waiting) + sequences > self._most_tenant or self.waiting + sequences > self._most:
            raise self._full()
        if not line.is_active:
            line.counter = self._bounded(max(line.counter, self._floor()))
        if not self.waiting and not self.inside:
            self._ended = self._clock()  # an empty queue before says nothing of the pace
        loop = asyncio.get_running_loop()
        tickets = [Ticket(line, self, loop.create_future(), cost) for cost in prompt_costs]
        for ticket in tickets:
            heappush(line.waiting, (TIERS.index(tier), next(self._order), ticket))
        self.waiting += sequences
        self._admit()
        try:
            yield tickets
        finally:
            for ticket in tickets:
                self.leave(ticket)

    def place(self, tenant: Tenant) -> int:
        """Number of the tenant's own sequences that wait: it sees nothing of others'."""
        return len(self._line(tenant).waiting)

    def line(self, tenant: Tenant, most: int) -> list[Ticket]:
        """The tenant's first `most` tickets that wait, in their order."""
        return [ticket for _, _, ticket in nsmallest(most, self._line(tenant).waiting)]

    def why(self) -> str:
        """The reason of those that wait."""
        if self._running + self._spare > self.inside:
            return "the free places are kept for tenants that have none"
        return f"all {self._running} places of the engine are taken"

    def running(self, tenant: Tenant) -> int:
        """Number of the tenant's own sequences that the engine has."""
        return self._line(tenant).inside

    def beside(self, tenant: Tenant, sequences: int) -> list[Ticket]:
        """Tickets of a request in the background: it takes nobody's place, and uses time that nobody has
        asked for."""
        entered = asyncio.get_running_loop().create_future()
        entered.set_result(None)
        line = self._line(tenant)
        return [Ticket(line, self, entered, 0.0, is_gone=True, is_beside=True) for _ in range(sequences)]

    def leave(self, ticket: Ticket) -> None:
        """Releases a ticket in any state; repeated calls are ignored."""
        if ticket.is_gone:
            return
        ticket.is_gone = True
        ticket.served(0.0)
        if ticket.is_in:
            ticket.line.inside -= 1
            self.inside -= 1
            self._note_end()
        else:
            ticket.line.waiting = [entry for entry in ticket.line.waiting if entry[2] is not ticket]
            ticket.line.waiting.sort()
            self.waiting -= 1
            ticket.entered.cancel()
        if not ticket.line.is_active:
            self._left = ticket.line.counter
        self._admit()

    def charge(self, tenant: Tenant, cost: float) -> None:
        """Charges a tenant for inference or training."""
        line = self._line(tenant)
        line.counter = self._bounded(line.counter + cost / line.tenant.weight)

    def note_job(self, tenant: Tenant, job: str, trains: bool) -> None:
        """Notes that a tenant's job starts or stops training."""
        jobs = self._line(tenant).jobs
        (jobs.add if trains else jobs.discard)(job)

    def _line(self, tenant: Tenant) -> _Line:
        line = self._lines.setdefault(tenant.id, _Line(tenant))
        line.tenant = tenant
        return line

    def _floor(self) -> float:
        """The lowest counter of active tenants, or else the last such value."""
        return min((line.counter for line in self._lines.values() if line.is_active), default=self._left)

    def _is_newcomer(self, line: _Line) -> bool:
        """Tells whether other tenants have work, none of them has a lower counter, and this one holds few
        places."""
        others = [other for other in self._lines.values() if other is not line and other.has_work]
        if not others:
            return False
        weight = line.tenant.weight
        share = self._running * weight / (weight + sum(other.tenant.weight for other in others))
        least = min(other.counter for other in others)
        return line.inside < max(_FEW * share, 1.0) and line.counter <= least + _AHEAD / weight

    def _bounded(self, counter: float) -> float:
        return min(counter, self._floor() + HORIZON)

    def _admit(self) -> None:
        while (line := self._next()) is not None:
            _, _, ticket = heappop(line.waiting)
            ticket.is_in, ticket.is_newcomer = True, self._is_newcomer(line)
            line.inside += 1
            self.waiting -= 1
            self.inside += 1
            self.charge(line.tenant, ticket.prompt_cost)
            if not ticket.entered.done():  # a waiting one may just have been cancelled, and about to leave
                ticket.entered.set_result(None)

    def _next(self) -> _Line | None:
        free = self._running + self._spare - self.inside
        reserve = self._reserve if len(self._lines) > 1 else 0
        entitled = [
            line
            for line in self._lines.values()
            if line.waiting and (free > reserve or (free > 0 and line.inside == 0))
        ]
        return min(entitled, key=lambda line: line.counter, default=None)

    def _note_end(self) -> None:
        now = self._clock()
        self._pause += _MEMORY * (now - self._ended - self._pause)
        self._ended = now

    def _full(self) -> ApiError:
        wait = min(max(math.ceil(self.waiting * self._pause), 1), _LONGEST_WAIT)
        message = "Too many requests are waiting; please try again later."
        return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(wait)})
