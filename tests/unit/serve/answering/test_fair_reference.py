"""The fair queue against a plain account of each tenant's work, places and waiting requests."""

import asyncio
import math
import random
from contextlib import ExitStack

import pytest

from coserve.serve.answering.fair import HORIZON, FairQueue, Ticket
from coserve.serve.errors import ApiError
from coserve.serve.store.records import Tenant

MOST, MOST_TENANT, RUNNING = 60, 25, 16
PLACES, RESERVE = RUNNING + 1, 1 + 2  # a sixteenth more enter; those kept for tenants without any
AHEAD = 512.0  # tokens that a newcomer's tenant may have had beyond the others


class Account:
    """One tenant: its `work` by weight, requests inside and waiting (in order), and whether it trains."""

    def __init__(self, name: str, weight: float) -> None:
        self.tenant = Tenant(name, name, weight=weight)
        self.work, self.trains = 0.0, False
        self.inside, self.waiting = list[Ticket](), list[Ticket]()

    @property
    def is_active(self) -> bool:
        return bool(self.inside or self.waiting)


class Reference:
    """All accounts; `left` is the work of the last tenant that ended its last request."""

    def __init__(self, accounts: list[Account]) -> None:
        self.accounts, self.left = accounts, 0.0

    @property
    def least(self) -> float:
        active = [one.work for one in self.accounts if one.is_active]
        return min(active) if active else self.left

    def charge(self, one: Account, cost: float) -> None:
        one.work = min(one.work + cost / one.tenant.weight, self.least + HORIZON)

    def is_newcomer(self, one: Account) -> bool:
        others = [other for other in self.accounts if other is not one and (other.is_active or other.trains)]
        weights = [other.tenant.weight for other in (one, *others)]
        few = max(RUNNING * weights[0] / sum(weights) / 2, 1)
        ahead = AHEAD / weights[0]
        return bool(
            others and len(one.inside) < few and one.work <= min(other.work for other in others) + ahead
        )

    def admit(self) -> list[tuple[Ticket, bool]]:
        """The tickets that enter now, in order, and whether as newcomers'."""
        entered = list[tuple[Ticket, bool]]()
        while True:
            free = PLACES - sum(len(one.inside) for one in self.accounts)
            may = [
                one
                for one in self.accounts
                if one.waiting and (free > RESERVE or (free > 0 and not one.inside))
            ]
            if not may:
                return entered
            one = min(may, key=lambda each: each.work)
            ticket = one.waiting.pop(0)
            entered.append((ticket, self.is_newcomer(one)))
            one.inside.append(ticket)
            self.charge(one, ticket.prompt_cost)


def test_who_had_least_enters_next_and_is_marked_where_others_have_had_more() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    asyncio.run(play(random.Random(seed)))


async def play(draw: random.Random) -> None:
    marks, refused = list[bool](), 0
    for _ in range(10):
        queue = FairQueue(MOST, MOST_TENANT, lambda: 0.0)
        queue.resize(RUNNING)
        accounts = [Account(name, draw.choice([1.0, 1.0, 3.0])) for name in "abc"]
        reference, owed = Reference(accounts), dict[Ticket, float]()
        for one in accounts:
            queue.know(one.tenant)
        with ExitStack() as stack:
            for _ in range(80):
                one, told = draw.choice(accounts), list[tuple[Ticket, bool]]()
                kind = draw.choice(["enter", "enter", "leave", "leave", "charge", "serve", "job"])
                if kind == "enter":
                    costs = [draw.uniform(0.0, 300.0) for _ in range(draw.randint(1, 12))]
                    waiting = sum(len(each.waiting) for each in accounts)
                    is_full = len(one.waiting) + len(costs) > MOST_TENANT or waiting + len(costs) > MOST
                    if is_full:
                        refused += 1
                        with pytest.raises(ApiError):
                            stack.enter_context(queue.enter(one.tenant, costs))
                        continue
                    if not one.is_active:
                        one.work = min(max(one.work, reference.least), reference.least + HORIZON)
                    tickets = stack.enter_context(queue.enter(one.tenant, costs))
                    one.waiting += tickets
                    told = reference.admit()
                elif kind == "leave" and one.is_active:
                    leaving = [(one, draw.choice(one.inside or one.waiting))]
                    if draw.random() < 0.1:  # all that there are
                        leaving = [
                            (each, gone) for each in accounts for gone in (*each.waiting, *each.inside)
                        ]
                    for each, ticket in leaving:
                        queue.leave(ticket)
                        reference.charge(each, owed.pop(ticket, 0.0))
                        (each.inside if ticket in each.inside else each.waiting).remove(ticket)
                        if not each.is_active:
                            reference.left = each.work
                        told += reference.admit()
                elif kind == "charge":
                    cost = draw.choice([10.0, 1000.0, 90_000.0])
                    queue.charge(one.tenant, cost)
                    reference.charge(one, cost)
                elif kind == "serve" and one.inside:
                    ticket, cost = draw.choice(one.inside), draw.choice([5.0, 90.0])
                    ticket.served(cost)
                    owed[ticket] = owed.get(ticket, 0.0) + cost
                    if owed[ticket] >= 32.0:  # a token at a time would be charged too often
                        reference.charge(one, owed.pop(ticket))
                elif kind == "job":
                    one.trains = draw.random() < 0.5
                    queue.note_job(one.tenant, "job", one.trains)
                assert queue.inside == sum(len(each.inside) for each in accounts)
                assert queue.waiting == sum(len(each.waiting) for each in accounts)
                assert all(ticket.is_in for each in accounts for ticket in each.inside)
                assert [ticket.is_newcomer for ticket, _ in told] == [is_new for _, is_new in told]
                marks += [is_new for _, is_new in told]
    assert True in marks and False in marks and refused


def test_requests_are_refused_where_the_line_is_full_of_ones_tenant_or_of_all() -> None:
    """Requests under way hold places as well. The time to come back is bounded."""
    now = [0.0]
    queue = FairQueue(MOST, MOST_TENANT, lambda: now[0])
    queue.resize(RUNNING)
    for under_way, of_tenant in ((0, 0), (MOST + PLACES - 1, 0), (0, MOST_TENANT + PLACES - 1)):
        queue.check(under_way, of_tenant)
    for under_way, of_tenant in ((MOST + PLACES, 0), (0, MOST_TENANT + PLACES)):
        with pytest.raises(ApiError) as refused:
            queue.check(under_way, of_tenant)
        assert refused.value.headers["Retry-After"] == "1"

    async def story() -> None:
        tenant = Tenant("a", "a")
        with queue.enter(tenant, [0.0] * MOST_TENANT) as tickets:
            for pause in (10.0, 1e4):
                now[0] += pause
                queue.leave(next(one for one in tickets if one.is_in and not one.is_gone))
                waits = math.ceil(queue.waiting * (1.0 if pause == 10.0 else 1e3))
                with pytest.raises(ApiError) as refused:
                    queue.check(MOST + PLACES, 0)
                assert refused.value.headers["Retry-After"] == str(min(waits, 60))

    asyncio.run(story())
