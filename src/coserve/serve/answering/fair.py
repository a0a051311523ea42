"""The fair queue before the engine: which tenant's request enters next when more wait than the engine runs at
once.

Virtual token counters ("Fairness in Serving Large Language Models", OSDI 2024): each tenant's counter grows
with the work done for it, divided by its weight, and the tenant whose counter is lowest goes first. Trained
tokens count as well as answered ones. The counter of a tenant that comes back is lifted to the lowest counter
of the active ones, so that no tenant saves up a right to flood; and no counter is ahead by more than
`HORIZON`, so that a long night of training on an idle machine is not held against its owner for long.

A place in the engine does not decide when the engine works on it: requests of a tenant that has had no more
than others and holds few places are marked as a newcomer's, and the engine computes their first token before
others' work.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from time import monotonic

from coserve.serve.errors import ApiError
from coserve.serve.settings import TIERS
from coserve.serve.store.records import Tenant

HORIZON = 50_000.0  # tokens
_CHARGED_AT_ONCE = 32.0  # tokens
_AHEAD = 512.0  # tokens that a newcomer's tenant may have had beyond the others: some prompts at once
_FEW = 0.5  # of its share of all places, that a newcomer's tenant may hold
_LONGEST_WAIT, _MEMORY = (
    60,
    0.1,
)  # seconds told to come back after; weight of the newest pause between two ends


@dataclass(slots=True, eq=False)
class Ticket:
    """One sequence's place: waiting, then in the engine, then gone."""

    line: "_Line"
    queue: "FairQueue"
    entered: asyncio.Future[None]
    prompt_cost: float  # charged when it is let in, so that nobody takes all free places at once
    is_in: bool = False
    is_gone: bool = False
    is_newcomer: bool = False  # decided when it is let in
    owed: float = 0.0

    async def admitted(self) -> None:
        """Returns when the sequence may go into the engine."""
        await self.entered

    def served(self, cost: float) -> None:
        """Charges work that was done for this sequence."""
        self.owed += cost
        if self.owed >= _CHARGED_AT_ONCE or self.is_gone:
            self.queue.charge(self.line.tenant, self.owed)
            self.owed = 0.0


@dataclass(slots=True, eq=False)
class _Line:
    """One tenant's tickets. `counter` is the work done for it over its weight."""

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
    """Bounded lines, one for each tenant, before the engine. For one event loop.

    `resize` says how many sequences the engine runs. Where more than one tenant is known, some of its places
    are kept for tenants who have none, so that a newcomer never waits for a flood to ebb.
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

    def resize(self, running: int) -> None:
        """Notes that the engine runs this many sequences at once; a few more wait in it, to fill gaps at
        once."""
        self._running, self._spare = running, max(1, running // 16)
        self._reserve = self._spare + (max(1, running // 8) if running >= 4 else 0)
        self._admit()

    def check(self, under_way: int, of_tenant: int) -> None:
        """Raises ApiError 429 where one more request could not even wait, with `under_way` requests in all
        and `of_tenant` of its tenant. For callers that have not read the request yet."""
        places = self._running + self._spare
        if of_tenant >= self._most_tenant + places or under_way >= self._most + places:
            raise self._full()

    def know(self, tenant: Tenant) -> None:
        """Notes a tenant that may send requests, and its weight from now on."""
        self._line(tenant)

    @contextmanager
    def enter(
        self, tenant: Tenant, prompt_costs: Sequence[float], tier: str = "default"
    ) -> Iterator[list[Ticket]]:
        """Places for all sequences of a request, or ApiError 429; leaving the block gives them back."""
        line, sequences = self._line(tenant), len(prompt_costs)
        if len(line.waiting) + sequences > self._most_tenant or self.waiting + sequences > self._most:
            raise self._full()
        if not line.is_active:
            line.counter = self._bounded(max(line.counter, self._floor()))
        if not self.waiting and not self.inside:
            self._ended = self._clock()  # that nobody came before tells nothing of how fast this goes
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

    def leave(self, ticket: Ticket) -> None:
        """Gives a place back, in whatever state; a second time is no error."""
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
        """Counts work that was done for a tenant, answered or trained."""
        line = self._line(tenant)
        line.counter = self._bounded(line.counter + cost / line.tenant.weight)

    def note_job(self, tenant: Tenant, job: str, trains: bool) -> None:
        """Notes that a job of the tenant trains, or no longer does."""
        jobs = self._line(tenant).jobs
        (jobs.add if trains else jobs.discard)(job)

    def _line(self, tenant: Tenant) -> _Line:
        line = self._lines.setdefault(tenant.id, _Line(tenant))
        line.tenant = tenant
        return line

    def _floor(self) -> float:
        """The lowest counter of tenants that wait or run; where there is none, that of the last one that
        did."""
        return min((line.counter for line in self._lines.values() if line.is_active), default=self._left)

    def _is_newcomer(self, line: _Line) -> bool:
        """Tells whether other tenants have work, none of them has had less, and this one holds few places."""
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
            if (
                not ticket.entered.done()
            ):  # whoever waited may just have been cancelled, and is about to leave
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
