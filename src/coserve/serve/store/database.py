"""One SQLite file with a writing thread, reading threads, and durable transactions.

The file is in WAL mode, so readers never wait for the writer; with `synchronous=FULL` a transaction has been
fsynced when `write` returns.
"""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, create_engine, event, select
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.orm import Session

from coserve.core.collection import collection_paused
from coserve.errors import StateError
from coserve.serve.store.examine import examine, explain
from coserve.serve.store.migrate import migrate
from coserve.serve.store.private import make_private_file
from coserve.serve.store.records import Page, Record

R = TypeVar("R")
Listed = TypeVar("Listed", bound=Record)
READERS: Final = 4
BUSY_SECONDS: Final = 10  # what a process waits for another that writes
# KiB of the file that each connection keeps in memory; the system keeps it as well. SQLite's own 2,000 each
# let a server grow by 6.6 KiB a job, and would up to 10 MB.
CACHE_KIB: Final = 256
MOST_PAGED: Final = 8 * 2**20  # characters of the rows of one page


class Database:
    """Runs functions of a session, each in one transaction, on its own threads. Returned rows are detached
    objects: changes to them are not written.

    Raises StateError if the file is no database, cannot be written, or is of a newer coserve; later also
    while the disk is full or another process locks the file for long, when a retry may succeed.
    """

    def __init__(self, path: Path) -> None:
        examine(path)
        make_private_file(path)  # SQLite gives the files beside it the same mode
        self._writes = _engine(path, "BEGIN IMMEDIATE")
        self._reads = _engine(path, "BEGIN")
        self._writer = ThreadPoolExecutor(1, "store-write")
        self._readers = ThreadPoolExecutor(READERS, "store-read")
        try:
            with self._writes.begin() as connection:
                migrate(connection, str(path))
        except (DatabaseError, sqlite3.Error) as error:  # the latter where it is only just opened
            self.close()
            raise explain(path, getattr(error, "orig", error)) from error
        except StateError:
            self.close()
            raise

    async def read(self, work: Callable[[Session], R]) -> R:
        """Runs `work` on a snapshot of the database."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, _run, self._reads, work)

    async def write(self, work: Callable[[Session], R]) -> R:
        """Runs `work` and returns when its changes are on disk; if `work` raises, nothing is changed.

        Cancelling the caller does not undo it.
        """
        run = copy_context().run  # the caller's, for the audit log
        return await asyncio.get_running_loop().run_in_executor(self._writer, run, _run, self._writes, work)

    def close(self) -> None:
        """Waits for running transactions and closes the file."""
        self._writer.shutdown()
        self._readers.shutdown()
        self._reads.dispose()
        self._writes.dispose()


def page_of(
    session: Session,
    kind: type[Listed],
    conditions: Sequence[ColumnElement[bool]],
    after: str | None,
    limit: int,
    ascending: bool = False,
    size: ColumnElement[int] | None = None,
) -> Page[Listed] | None:
    """At most `limit` rows that meet all conditions, the newest first unless `ascending`, after the row with
    the id `after`. Of rows that have a `size` in characters there are no more than fit a page, and one.

    None if no such row has that id.
    """
    query = select(kind).where(*conditions)
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


def _from_json(text: str) -> Any:
    with collection_paused():  # clients' metadata may have a hundred thousand lists
        return json.loads(text)


def _run(engine: Engine, work: Callable[[Session], R]) -> R:
    try:
        with Session(engine, expire_on_commit=False) as session, session.begin():
            return work(session)
    except DatabaseError as error:
        # The others of its subclasses are bugs; damage that shows itself has the class itself.
        if not isinstance(error, OperationalError) and type(error) is not DatabaseError:
            raise
        raise StateError(f"the database cannot be used now: {error.orig}") from error


def _engine(path: Path, begin: str) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}", connect_args={"timeout": BUSY_SECONDS}, json_deserializer=_from_json
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver's own idea of transactions leaves out DDL
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            f"cache_size=-{CACHE_KIB}",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
