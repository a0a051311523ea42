"""Base of the databases: transactions on threads of their own, and pages of lists.

`sqlite.py` and `postgres.py` have each one's part, `opening.py` chooses.
"""

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial, wraps
from itertools import accumulate
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from sqlalchemy import ColumnElement, Engine, select
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.orm import Session

from coserve.core.collection import collection_paused
from coserve.errors import StateError
from coserve.serve.store.records import OwnedRecord, Page, Record

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Transacting")
Listed = TypeVar("Listed", bound=Record)
Own = TypeVar("Own", bound=OwnedRecord)
READERS: Final = 4
MOST_PAGED: Final = 8 * 2**20  # characters of the rows of one page


class Database(ABC):
    """Runs functions of a session, each in one transaction, on its own threads. Returned rows are detached
    objects: changes to them are not written. Transactions are as if they ran one after the other, also those
    of several servers.

    Raises StateError if the database cannot be used, or is of a newer coserve; later also while it is away,
    its disk is full or another process locks it for long, when a retry may succeed.
    """

    def __init__(self, reads: Engine, writes: Engine) -> None:
        self._reads, self._writes = reads, writes
        self._writer = ThreadPoolExecutor(1, "store-write")
        self._readers = ThreadPoolExecutor(READERS, "store-read")

    async def read(self, work: Callable[[Session], R]) -> R:
        """Runs `work` on a snapshot of the database."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._run, self._reads, work)

    async def write(self, work: Callable[[Session], R]) -> R:
        """Runs `work` and returns when its changes are on disk; if `work` raises, nothing is changed. `work`
        may run again, from its beginning, where another server's transaction came in between.

        Cancelling the caller does not undo it.
        """
        run = partial(self._run, self._writes, work)
        # In the caller's context, for the audit log.
        return await asyncio.get_running_loop().run_in_executor(self._writer, copy_context().run, run)

    @abstractmethod
    def now(self, session: Session) -> float:
        """The database's clock, in seconds: one for all servers."""

    def clock(self) -> float:
        """Seconds since 1970, by which all servers of the database decide what has expired."""
        return time.time()

    def close(self) -> None:
        """Waits for running transactions and closes the database."""
        self._writer.shutdown()
        self._readers.shutdown()
        self._reads.dispose()
        self._writes.dispose()

    def _run(self, engine: Engine, work: Callable[[Session], R]) -> R:
        try:
            with Session(engine, expire_on_commit=False) as session, session.begin():
                return work(session)
        except DatabaseError as error:
            # The others of its subclasses are bugs; damage that shows itself has the class itself.
            if not isinstance(error, OperationalError) and type(error) is not DatabaseError:
                raise
            raise StateError(f"the database cannot be used now: {error.orig}") from error


class Transacting(Protocol):
    """A store of rows in a database."""

    _database: Database


def reads(
    method: Callable[Concatenate[S, Session, P], R],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Has a store's method run in a transaction that reads. Callers await it, and give no session."""

    @wraps(method)
    async def read(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._database.read(lambda session: method(self, session, *args, **kwargs))

    return read


def writes(
    method: Callable[Concatenate[S, Session, P], R],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """As `reads`, in a transaction that writes, see `Database.write`: it may run again from its beginning."""

    @wraps(method)
    async def write(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._database.write(lambda session: method(self, session, *args, **kwargs))

    return write


def owned(session: Session, kind: type[Own], tenant: str, id: str) -> Own | None:
    """The tenant's record with this id."""
    return session.scalar(select(kind).where(kind.tenant == tenant, kind.id == id))


def page_of(
    session: Session,
    kind: type[Listed],
    conditions: Sequence[ColumnElement[bool]],
    after: str | None,
    limit: int,
    ascending: bool = False,
    size: ColumnElement[int] | None = None,
    filters: Sequence[ColumnElement[bool]] = (),
) -> Page[Listed] | None:
    """At most `limit` rows that meet all conditions and filters, the newest first unless `ascending`, after
    the row with the id `after`. Of rows that have a `size` in characters there are no more than fit a page,
    and one.

    None if no row that meets the conditions has that id. It need not meet the filters: the last job of a page
    of those that run may be over when the next page is read.
    """
    query = select(kind).where(*conditions, *filters)
    if after is not None:
        at = session.scalar(select(kind.number).where(*conditions, kind.id == after))
        if at is None:
            return None
        query = query.where(kind.number > at if ascending else kind.number < at)
    query = query.order_by(kind.number if ascending else kind.number.desc()).limit(limit + 1)
    if size is not None:
        sizes = accumulate(session.scalars(query.with_only_columns(size)))
        limit = min(limit, max(sum(total <= MOST_PAGED for total in sizes), 1))
        query = query.limit(limit + 1)
    rows = session.scalars(query).all()
    return Page(tuple(rows[:limit]), len(rows) > limit)


def from_json(text: str) -> Any:
    """The value of a column of JSON."""
    with collection_paused():  # clients' metadata may have a hundred thousand lists
        return json.loads(text)
