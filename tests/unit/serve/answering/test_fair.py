import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import pytest

from coserve.serve.answering.fair import HORIZON, FairQueue, Ticket
from coserve.serve.errors import ApiError
from coserve.serve.store.records import Tenant

A, B, C = Tenant("a", "A"), Tenant("b", "B"), Tenant("c", "C", weight=3.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await story()

    asyncio.run(run())


def inside(tickets: list[Ticket]) -> int:
    return sum(ticket.is_in and not ticket.is_gone for ticket in tickets)


def rounds(
    queue: FairQueue, tickets: dict[str, list[Ticket]], costs: dict[str, float], count: int
) -> dict[str, int]:
    """Ends the oldest sequence inside `count` times, each time charging it; how many ended, by tenant."""
    ended = dict.fromkeys(tickets, 0)
    running = [ticket for all_of in tickets.values() for ticket in all_of if ticket.is_in]
    for _ in range(count):
        ticket = running.pop(0)
        name = ticket.line.tenant.id
        ticket.served(costs[name])
        before = {t for all_of in tickets.values() for t in all_of if t.is_in}
        queue.leave(ticket)
        ended[name] += 1
        running += [t for all_of in tickets.values() for t in all_of if t.is_in and t not in before]
    return ended


def test_a_flood_does_not_delay_a_newcomer() -> None:
    async def story() -> None:
        queue = FairQueue(1000, 500)
        queue.resize(16)
        queue.know(A)
        queue.know(B)
        with queue.enter(A, [0.0] * 400) as flood:
            assert inside(flood) == 14  # some places are kept
            with queue.enter(B, [0.0] * 1) as mine:
                await asyncio.wait_for(mine[0].admitted(), 1)

    play(story)


def test_who_has_had_less_than_others_is_a_newcomer() -> None:
    async def story() -> None:
        queue = FairQueue(1000, 500)
        queue.resize(16)
        for tenant in (A, B, C):
            queue.know(tenant)
        with queue.enter(A, [10.0] * 40) as flood:
            assert not any(ticket.is_newcomer for ticket in flood)  # nobody else is there
            flood[0].served(4000.0)
            with queue.enter(B, [10.0] * 1) as mine:
                assert mine[0].is_newcomer
            with queue.enter(B, [5000.0, 5000.0]) as long:  # in company of what it had before
                assert [ticket.is_newcomer for ticket in long] == [True, False]
            with queue.enter(B, [10.0] * 1) as late:
                assert not late[0].is_newcomer
        with queue.enter(B, [10.0] * 1) as alone:
            assert not alone[0].is_newcomer

    play(story)


def test_who_comes_beside_anothers_training_is_a_newcomer() -> None:
    async def story() -> None:
        queue = FairQueue(1000, 500)
        queue.resize(16)
        queue.know(B)
        for trains in (True, False):
            queue.note_job(A, "job", trains)
            queue.charge(A, 1000.0)
            for tenant, expected in ((A, False), (B, trains)):
                with queue.enter(tenant, [10.0]) as mine:
                    assert mine[0].is_newcomer == expected

    play(story)


def test_one_tenant_alone_has_the_whole_machine() -> None:
    async def story() -> None:
        queue = FairQueue(1000, 500)
        queue.resize(16)
        with queue.enter(A, [0.0] * 400) as all_mine:
            assert inside(all_mine) == 17 and queue.waiting == 383
        assert queue.inside == queue.waiting == 0

    play(story)


@pytest.mark.parametrize(
    ("others", "costs", "expected"),
    [
        (B, {"a": 10.0, "b": 10.0}, 1.0),
        (B, {"a": 10.0, "b": 40.0}, 4.0),  # work counts, not requests
        (C, {"a": 10.0, "c": 10.0}, 1 / 3),  # and weight
    ],
)
def test_shares_follow_work_and_weight(others: Tenant, costs: dict[str, float], expected: float) -> None:
    async def story() -> None:
        queue = FairQueue(1000, 500)
        queue.resize(16)
        with queue.enter(A, [0.0] * 400) as one, queue.enter(others, [0.0] * 400) as two:
            ended = rounds(queue, {"a": one, others.id: two}, costs, 300)
        assert ended["a"] / ended[others.id] == pytest.approx(expected, rel=0.15)

    play(story)


def test_trained_tokens_count_as_well() -> None:
    async def story() -> None:
        queue = FairQueue(1000, 500)
        with queue.enter(A, [10.0] * 9) as one, queue.enter(B, [10.0] * 9) as two:
            queue.charge(A, 1000.0)
            queue.resize(8)
            assert (inside(one), inside(two)) == (1, 7)  # one place is kept for who has none

    play(story)


def test_prompts_are_charged_when_they_are_let_in() -> None:
    async def story() -> None:
        queue = FairQueue(1000, 500)
        with queue.enter(A, [10.0] * 9) as one, queue.enter(B, [5.0] * 9) as two:
            queue.resize(16)
            assert (inside(one), inside(two)) == (5, 9)

    play(story)


def test_being_away_saves_nothing_up_and_training_is_forgiven() -> None:
    async def story() -> None:
        queue = FairQueue(1000, 500)
        queue.resize(4)
        with queue.enter(A, [0.0] * 100):
            for _ in range(50):
                queue.charge(A, 1000.0)
            with queue.enter(B, [0.0] * 100):
                assert queue._lines["b"].counter == queue._lines["a"].counter
                queue.charge(B, 1e9)
                assert queue._lines["b"].counter <= queue._lines["a"].counter + HORIZON

    play(story)


def test_lines_are_bounded_and_say_when_to_come_back() -> None:
    async def story() -> None:
        clock = Clock()
        queue = FairQueue(10, 6, clock)
        queue.resize(1)
        with ExitStack() as stack:
            first = stack.enter_context(queue.enter(A, [0.0] * 6))
            for _ in range(2):
                clock.now += 30.0
                queue.leave(first.pop(0))
            stack.enter_context(queue.enter(A, [0.0] * 2))
            assert queue.waiting == 4
            with pytest.raises(ApiError) as tenant_full:
                stack.enter_context(queue.enter(A, [0.0] * 3))
            stack.enter_context(queue.enter(B, [0.0] * 6))
            with pytest.raises(ApiError) as all_full:
                stack.enter_context(queue.enter(C, [0.0] * 1))
        for refused in (tenant_full.value, all_full.value):
            assert refused.status == 429 and 1 < int(refused.headers["Retry-After"]) <= 60
        assert queue.waiting == queue.inside == 0

    play(story)


def test_a_quiet_hour_makes_nobody_wait_longer() -> None:
    async def story() -> None:
        clock = Clock()
        queue = FairQueue(10, 6, clock)
        queue.resize(1)
        for _ in range(3):
            with queue.enter(A, [0.0]):
                clock.now += 0.5
            clock.now += 3600.0
        with queue.enter(A, [0.0] * 4), pytest.raises(ApiError) as refused, queue.enter(A, [0.0] * 6):
            pass
        assert refused.value.headers["Retry-After"] == "1"

    play(story)


def test_tiers_order_a_tenants_own_requests() -> None:
    async def story() -> None:
        queue = FairQueue(100, 50)
        with (
            queue.enter(A, [0.0] * 1, "flex") as flex,
            queue.enter(A, [0.0] * 1) as plain,
            queue.enter(A, [0.0] * 1, "priority") as urgent,
        ):
            queue.resize(1)  # and one spare
            assert (inside(urgent), inside(plain), inside(flex)) == (1, 1, 0)

    play(story)


def test_who_gives_up_waiting_is_forgotten() -> None:
    async def story() -> None:
        queue = FairQueue(100, 50)
        queue.resize(1)

        async def wait() -> None:
            with queue.enter(A, [0.0] * 3) as tickets:
                for ticket in tickets:
                    await ticket.admitted()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert queue.waiting == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert queue.waiting == queue.inside == 0

    play(story)
