"""A database in one SQLite file, of one server.

The file is in WAL mode, so readers never wait for the writer; with `synchronous=FULL` a transaction has been
fsynced when `write` returns.
"""

import sqlite3
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session

from coserve.errors import StateError
from coserve.serve.store.database import Database, from_json
from coserve.serve.store.examine import examine, explain
from coserve.serve.store.migrate import migrate
from coserve.serve.store.private import make_private_file

BUSY_SECONDS: Final = 10  # what a process waits for another that writes
# KiB of the file that each connection keeps in memory; the system keeps it as well. SQLite's own 2,000 each
# let a server grow by 6.6 KiB a job, and would up to 10 MB.
CACHE_KIB: Final = 256
_NOW: Final = text("SELECT (julianday('now') - 2440587.5) * 86400.0")


class SqliteDatabase(Database):
    """A database in a file."""

    def __init__(self, path: Path) -> None:
        examine(path)
        make_private_file(path)  # SQLite gives the files beside it the same mode
        super().__init__(_engine(path, "BEGIN"), _engine(path, "BEGIN IMMEDIATE"))
        try:
            with self._writes.begin() as connection:
                migrate(connection, str(path))
        except (DatabaseError, sqlite3.Error) as error:  # the latter where it is only just opened
            self.close()
            raise explain(path, getattr(error, "orig", error)) from error
        except StateError:
            self.close()
            raise

    def now(self, session: Session) -> float:
        """The database's clock, in seconds."""
        return float(session.scalar(_NOW))


def _engine(path: Path, begin: str) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}",
        connect_args={"timeout": BUSY_SECONDS},
        json_deserializer=from_json,
        hide_parameters=True,  # of statements in errors, which are logged: prompts and answers
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
