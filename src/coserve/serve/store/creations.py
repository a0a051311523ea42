"""Creations of requests with an `Idempotency-Key`: a request that comes again gets the first one's reply."""

import hashlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from coserve.errors import ConflictError
from coserve.serve.store.database import Database, reads, writes
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import Creation

MOST_REPLY: Final = 16 * 1024  # bytes of a reply that is kept
_MOST: Final = 500  # rows that one turn of `sweep` deletes: the writing thread is shared


@dataclass
class Creating:
    """A request with a key that is under way. `digest` tells what it asks for, once its body is read."""

    id: str
    tenant: str
    digest: Callable[[], str]
    is_over: bool = False  # of which tasks that it has begun may not know
    row: Creation | None = None


CREATING: Final[ContextVar[Creating | None]] = ContextVar("CREATING", default=None)


class CreationStore:
    """The newest creations of each tenant, as many and for as long as its quotas have it. The stores of what
    is created add the rows (`note`), in the same transaction: whenever the server ends, a key is kept if
    its request has had an effect, and only then."""

    def __init__(self, database: Database, clock: Callable[[], float], quotas: Quotas) -> None:
        self._database, self._clock = database, clock
        self._most, self._seconds = quotas.creations, quotas.creation_seconds

    @reads
    def find(self, session: Session, id: str) -> Creation | None:
        """The creation of the key with this id."""
        return session.scalar(select(Creation).where(Creation.id == id, Creation.created > self._oldest))

    @writes
    def finish(
        self, session: Session, creating: Creating, status: int, content_type: str, reply: str | None
    ) -> None:
        """Keeps a request's reply; None for one that is too large."""
        row = creating.row or self._noted(session, creating, "")
        row = session.merge(row)
        row.status, row.content_type, row.reply = status, content_type, reply

    async def sweep(self) -> bool:
        """Deletes some of what is too old; True where more may be left."""

        def write(session: Session) -> int:
            old = select(Creation.number).where(Creation.created <= self._oldest).limit(_MOST)
            numbers = session.scalars(old).all()
            session.execute(delete(Creation).where(Creation.number.in_(numbers)))
            return len(numbers)

        return await self._database.write(write) == _MOST

    def note(self, session: Session, location: str) -> None:
        """Notes what the present request creates, where it has a key: in that transaction, with the path
        where it can be read. Raises ConflictError where another server was quicker with this key."""
        creating = CREATING.get()
        if creating is not None and not creating.is_over:
            self._noted(session, creating, location)

    def _noted(self, session: Session, creating: Creating, location: str) -> Creation:
        same = Creation.id == creating.id
        if session.scalar(select(Creation.id).where(same, Creation.created > self._oldest)) is not None:
            raise ConflictError("Another server has answered a request with this Idempotency-Key.")
        session.execute(delete(Creation).where(same))  # one that is too old
        own = Creation.tenant == creating.tenant
        beyond = select(Creation.number).where(own).order_by(Creation.number.desc()).offset(self._most - 1)
        session.execute(delete(Creation).where(Creation.number.in_(beyond.limit(_MOST))))
        now = int(self._clock())
        row = Creation(creating.id, creating.tenant, now, creating.digest(), location)
        session.add(row)
        session.flush()
        creating.row = row
        return row

    @property
    def _oldest(self) -> float:
        return self._clock() - self._seconds


def creation_id(tenant: str, key: str) -> str:
    """Id of a tenant's key."""
    return hashlib.sha256(f"{tenant} {key}".encode()).hexdigest()
