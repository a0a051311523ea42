"""Leases: drawn histories of servers that share a database, against a reference and a history checker."""

import asyncio
import random
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from coserve.serve.store import leases as module
from coserve.serve.store.database import Database
from coserve.serve.store.leases import FORGET_SECONDS, LEASE_SECONDS, RENEW_SECONDS, SERVER, Leases
from coserve.serve.store.opening import open_database
from lease_history import Fact, violations

STEPS, SERVERS, SUBJECTS = 150, ("a", "b", "c"), ("x", "y")


class Clocks:
    """The monotonic clock of all servers, and the database's, which may jump."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
        self.steady, self.database = 1000.0, 5000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.steady)
        monkeypatch.setattr(database, "now", lambda _: self.database)

    def pass_by(self, seconds: float) -> None:
        self.steady += seconds
        self.database += seconds


class Reference:
    """Leases as a table in plain words."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[str, int, float]] = {}

    def take(self, subject: str, owner: str, fence: int, now: float, steady: bool) -> int | None:
        had, number, expires = self.rows.get(subject, ("", 0, now))
        if had not in (owner, "") and not (expires <= now and steady):
            return None
        number += had != owner or number != fence
        self.rows[subject] = owner, number, now + LEASE_SECONDS
        return number

    def holds(self, subject: str, owner: str, fence: int) -> bool:
        return self.rows.get(subject, ("", 0, 0.0))[:2] == (owner, fence)


@pytest.fixture
def opened(tmp_path: Path, database: str) -> Database:
    return open_database(tmp_path, database)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9))])
def test_no_history_has_two_owners(opened: Database, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw, clocks = random.Random(seed), Clocks(monkeypatch, opened)
    facts = [Fact("acknowledged", subject) for subject in SUBJECTS]
    reference, lives = Reference(), dict.fromkeys(SERVERS, 0)
    servers = {name: Leases(opened, name) for name in SERVERS}
    asleep: dict[str, int] = {}  # servers that hang, and for how many turns
    ended = set[str]()
    taken = 0

    async def turn() -> None:
        nonlocal taken
        clocks.pass_by(draw.choice((0.1, 1.0, RENEW_SECONDS)))
        match draw.randrange(30):
            case 0:  # a server dies, and starts again by the same name
                name = draw.choice(SERVERS)
                servers[name], lives[name] = Leases(opened, name), lives[name] + 1
            case 1 | 2 | 3:
                asleep[draw.choice(SERVERS)] = draw.randrange(10)
            case 4:
                clocks.database += draw.choice((-100.0, -LEASE_SECONDS, LEASE_SECONDS, 100.0))
        name, subject = draw.choice(SERVERS), draw.choice(SUBJECTS)
        server, life = servers[name], f"{name}{lives[name]}"
        had = {one: server.fence("job", one) for one in SUBJECTS}
        if asleep.get(name, 0) > 0:  # what it has begun goes on: a write comes late
            asleep[name] -= 1
        else:
            held = {one for one in SUBJECTS if had[one] and reference.holds(one, name, had[one])}
            lost = await server.renew()
            assert {one for _, one in lost} == {one for one in SUBJECTS if had[one]} - held
            for one in held:
                reference.rows[one] = name, had[one], clocks.database + LEASE_SECONDS
            if subject not in ended and draw.random() < 0.5:
                steady = clocks.steady - server._steady >= LEASE_SECONDS
                before = server.fence("job", subject)
                wanted = reference.take(subject, name, before, clocks.database, steady)
                assert await server.claim("job", subject) is (wanted is not None)
                if wanted is not None:
                    assert server.fence("job", subject) == wanted
                    taken += wanted != before
                    facts.append(Fact("taken", subject, life, wanted))
        fence, ends = server.fence("job", subject), draw.random() < 0.004

        def write(session: Session) -> bool:
            return server.holds(session, "job", subject) and subject not in ended

        wrote = await opened.write(write)
        assert wrote is (reference.holds(subject, name, fence) and subject not in ended)
        if wrote:
            facts.append(Fact("ended" if ends else "written", subject, life, fence))
            ended.update({subject} if ends else ())

    async def history() -> None:
        for _ in range(STEPS):
            await turn()

    asyncio.run(history())
    opened.close()
    assert violations(facts) == []
    assert seed or taken > len(SUBJECTS), "this seed has servers that take over from others"


def test_the_checker_sees_what_must_not_be() -> None:
    first = [Fact("acknowledged", "x"), Fact("taken", "x", "a", 1), Fact("written", "x", "a", 1)]
    good = [*first, Fact("taken", "x", "b", 2), Fact("ended", "x", "b", 2)]
    assert violations(good, is_over=True) == []
    for bad in (
        [*first, Fact("taken", "x", "b", 1)],
        [*first, Fact("taken", "x", "b", 2), Fact("written", "x", "a", 1)],
        [*good, Fact("ended", "x", "b", 2)],
        [*first, Fact("taken", "x", "b", 2), Fact("taken", "x", "a", 1)],
    ):
        assert len(violations(bad)) >= 1, bad
    assert violations(first, is_over=True) == ["x was lost"]


def test_a_lease_that_was_given_back_is_another_s_at_once(
    opened: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks, a, b = Clocks(monkeypatch, opened), Leases(opened, "a"), Leases(opened, "b")

    async def story() -> None:
        assert await a.claim("job", "x") and not await b.claim("job", "x")
        assert await b.of_others("job") == {"x"} and not await a.of_others("job")
        await a.release("job", "x")
        assert not await b.of_others("job") and await b.claim("job", "x") and b.fence("job", "x") == 2
        clocks.pass_by(LEASE_SECONDS + 1)
        c = Leases(opened, "c")
        assert not await c.claim("job", "x"), "one that has only begun lets others renew first"
        clocks.pass_by(LEASE_SECONDS + 1)
        await c.renew()
        clocks.pass_by(LEASE_SECONDS)  # it was away for longer than between two renewals
        for _ in range(5):
            clocks.pass_by(RENEW_SECONDS)
            await c.renew()
        assert await c.claim("job", "x") and await b.renew() == {("job", "x")}
        assert not b.has("job", "x")
        await c.release("job", "x")
        clocks.pass_by(FORGET_SECONDS + 1)
        await a.claim("job", "z")
        await a.release("job", "z")
        assert await b.claim("job", "x") and b.fence("job", "x") == 1, "it was forgotten"

    asyncio.run(story())
    opened.close()


def test_servers_that_are_there_are_told_with_their_work(
    opened: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(monkeypatch, opened)

    async def story() -> None:
        first, second = Leases(opened, "first"), Leases(opened, "second")
        await first.claim("job", "early")
        assert await first.servers() == {}
        for one in (second, first):
            await one.claim(SERVER, one.owner)
        await first.claim("job", "late")
        await first.claim("batch", "b")
        told = {"first": {"job": 2, "batch": 1}, "second": {}}
        assert await second.servers() == told and list(told) == list(await first.servers())
        clocks.pass_by(LEASE_SECONDS - 1)
        await first.renew()
        clocks.pass_by(2)
        assert await second.servers() == {"first": told["first"]}
        await first.release(SERVER, "first")
        assert await second.servers() == {}

    asyncio.run(story())
