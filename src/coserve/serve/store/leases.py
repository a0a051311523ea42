"""Leases: which server does a piece of work, such as a job or a batch, of those that share a database.

A lease has an owner, an end by the database's clock, and a *fencing number*, which grows whenever somebody
takes it. Whoever writes about the work compares owner and number in the same transaction (`holds`), so a
server that was away for long, and does not know that it has lost its lease, changes nothing. Clocks of
servers do not count; a database's clock that jumps ends leases early or late, and no work has two owners by
that.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Set
from typing import Final

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from coserve.errors import CoserveError, LeaseLost, StateError
from coserve.serve.store.database import Database, reads
from coserve.serve.store.records import LeaseRecord

log = logging.getLogger(__name__)

LEASE_SECONDS: Final = 8.0  # after its last renewal others may take it
RENEW_SECONDS: Final = 2.0  # between two renewals
FORGET_SECONDS: Final = 86_400.0  # after which a lease that nobody has is forgotten
NOBODY: Final = ""  # owner of a lease that was given back
SERVER: Final = "server"  # kind of the lease that says that a server is there: its subject is the owner
MOST_SERVERS: Final = 64  # that are told of at once
LeaseKey = tuple[str, str]  # kind and subject


class Leases:
    """The leases of one server, its `owner`. They survive its restarts, as the owner's name does."""

    def __init__(self, database: Database, owner: str) -> None:
        self._database, self.owner = database, owner
        self._held: dict[LeaseKey, int] = {}  # with their fencing numbers
        # Called after each renewal, with the leases that were lost.
        self.on_renewed: list[Callable[[Set[LeaseKey]], Awaitable[None]]] = []
        self._renewed = self._steady = time.monotonic()  # the last renewal, and the first of those in a row

    def has(self, kind: str, subject: str) -> bool:
        """Tells whether this server had a lease when it last looked."""
        return (kind, subject) in self._held

    def subjects(self, kind: str) -> Set[str]:
        """Subjects of this server's leases of a kind."""
        return {subject for of_kind, subject in self._held if of_kind == kind}

    def fence(self, kind: str, subject: str) -> int:
        """The fencing number of a lease, 0 without one."""
        return self._held.get((kind, subject), 0)

    async def claim(self, kind: str, subject: str) -> bool:
        """Takes a lease that nobody has, or whose end has come; False if another server has it."""
        fence = await self._database.write(lambda session: self.take(session, kind, subject))
        return self.note(kind, subject, fence)

    async def claim_left(self, kind: str, subject: str) -> bool:
        """Takes a lease that its owner did not give back before its end came, or that an earlier start of
        this server had; False for any other."""

        def write(session: Session) -> int | None:
            found = session.get(LeaseRecord, (kind, subject))
            own = found is not None and (found.owner, found.fence) == (self.owner, self.fence(kind, subject))
            is_left = found is not None and found.owner != NOBODY and not own
            return self.take(session, kind, subject) if is_left else None

        return self.note(kind, subject, await self._database.write(write))

    def take(self, session: Session, kind: str, subject: str) -> int | None:
        """Takes a lease in a transaction, after which `note` gets the fencing number; None if another server
        has it."""
        found = session.get(LeaseRecord, (kind, subject), with_for_update=True)
        now = self._database.now(session)
        if found is None:
            found = LeaseRecord(kind, subject, self.owner, 0, now)
            session.add(found)
        elif found.owner not in (self.owner, NOBODY) and (found.expires > now or not self._is_steady()):
            return None
        if (found.owner, found.fence) != (self.owner, self._held.get((kind, subject))):
            found.owner, found.fence = self.owner, found.fence + 1
        found.expires = now + LEASE_SECONDS
        session.flush()
        return found.fence

    def note(self, kind: str, subject: str, fence: int | None) -> bool:
        """Notes what `take` returned, once its transaction has ended; False for None."""
        if fence is None:
            return False
        self._held[kind, subject] = fence
        return True

    def holds(self, session: Session, kind: str, subject: str) -> bool:
        """Tells in a transaction whether this server may write about a subject: it has the lease, and nobody
        has taken it since."""
        found = session.get(LeaseRecord, (kind, subject), with_for_update={"read": True})
        return found is not None and (found.owner, found.fence) == (self.owner, self.fence(kind, subject))

    async def is_confirmed(self, kind: str, subject: str) -> bool:
        """Tells whether the database has a lease as this server's, now."""
        found = select(LeaseRecord.owner, LeaseRecord.fence).where(
            LeaseRecord.kind == kind, LeaseRecord.subject == subject
        )
        row = await self._database.read(lambda session: session.execute(found).one_or_none())
        return row is not None and tuple(row) == (self.owner, self.fence(kind, subject))

    def require(self, session: Session, kind: str, subject: str) -> None:
        """Raises LeaseLost unless `holds`: nothing of the transaction is written."""
        if not self.holds(session, kind, subject):
            raise LeaseLost(f"another server has taken over the {kind} {subject}")

    async def keep(self) -> None:
        """Renews leases until cancelled, and has what works with them follow."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                lost = await self.renew()
                for follow in self.on_renewed:
                    await follow(lost)
            except CoserveError as error:
                log.warning("leases cannot be renewed now: %s", error)

    async def release_but(self, kind: str, under_way: Collection[str]) -> None:
        """Gives all leases of a kind back but those of work that is under way."""
        for subject in self.subjects(kind) - set(under_way):
            await self.release(kind, subject)

    async def release(self, kind: str, subject: str) -> None:
        """Gives a lease back. Its row stays for a day, so that the next owner's number is a greater one."""
        fence = self._held.pop((kind, subject), None)
        own = (
            LeaseRecord.kind == kind,
            LeaseRecord.subject == subject,
            LeaseRecord.owner == self.owner,
            LeaseRecord.fence == fence,
        )

        def write(session: Session) -> None:
            now = self._database.now(session)
            session.execute(update(LeaseRecord).where(*own).values(owner=NOBODY, expires=now))
            session.execute(delete(LeaseRecord).where(LeaseRecord.expires < now - FORGET_SECONDS))

        if fence is not None:
            await self._database.write(write)

    async def renew(self) -> frozenset[LeaseKey]:
        """Renews all leases; returns those that others have taken. Raises StateError while the database is
        away, which ends no lease by itself: nobody can take one either."""
        held = dict(self._held)

        def write(session: Session) -> set[LeaseKey]:
            end = self._database.now(session) + LEASE_SECONDS
            rows = session.scalars(select(LeaseRecord).where(LeaseRecord.owner == self.owner)) if held else ()
            own = [row for row in rows if held.get((row.kind, row.subject)) == row.fence]
            for row in own:
                row.expires = end
            return {(row.kind, row.subject) for row in own}

        now = time.monotonic()
        if now - self._renewed > 2 * RENEW_SECONDS:  # this process has been stopped, or the database away
            self._steady = now
        try:
            renewed = await self._database.write(write)
        except StateError:
            self._steady = time.monotonic() + RENEW_SECONDS
            raise
        self._renewed = time.monotonic()
        gone = {key: fence for key, fence in held.items() if key not in renewed}
        lost = frozenset(key for key, fence in gone.items() if self._held.get(key) == fence)
        for key in lost:
            del self._held[key]
            log.warning("another server has taken over the %s %s", *key)
        return lost

    @reads
    def of_others(self, session: Session, kind: str) -> Collection[str]:
        """Subjects whose leases other servers have, and that this one may not take now."""
        others = select(LeaseRecord.subject).where(
            LeaseRecord.kind == kind, LeaseRecord.owner.not_in((self.owner, NOBODY))
        )
        if self._is_steady():
            others = others.where(LeaseRecord.expires > self._database.now(session))
        return frozenset(session.scalars(others))

    @reads
    def servers(self, session: Session) -> dict[str, dict[str, int]]:
        """The servers that have said that they are there, by name: the number of their leases of each
        kind."""
        lives = LeaseRecord.expires > self._database.now(session)
        there = select(LeaseRecord.owner).where(LeaseRecord.kind == SERVER, lives)
        names = session.scalars(there.order_by(LeaseRecord.owner).limit(MOST_SERVERS)).all()
        counts = select(LeaseRecord.owner, LeaseRecord.kind, func.count()).where(
            lives, LeaseRecord.owner.in_(names), LeaseRecord.kind != SERVER
        )
        found: dict[str, dict[str, int]] = {name: {} for name in names}
        for owner, kind, count in session.execute(counts.group_by(LeaseRecord.owner, LeaseRecord.kind)):
            found[owner][kind] = count
        return found

    def _is_steady(self) -> bool:
        """Tells whether this server has seen the database for as long as a lease lasts. After the database
        was away all leases have ended, and their owners renew them first."""
        return time.monotonic() - self._steady >= LEASE_SECONDS
