"""A PostgreSQL database, which several servers share.

Writing transactions are serializable, so that what one looks up before it writes holds for all servers:
quotas, names that are free, leases. One that another came in between of is repeated.
"""

import random
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from sqlalchemy import URL, Engine, create_engine, make_url, text
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from coserve.core.masking import masked
from coserve.errors import ConfigError, RequestError, StateError
from coserve.serve.store.database import READERS, Database, from_json
from coserve.serve.store.examine import cannot_be_used
from coserve.serve.store.migrate import migrate

R = TypeVar("R")
SCHEMES: Final = ("postgresql", "postgres", "postgresql+psycopg")
RETRY_SECONDS: Final = 10.0  # in which a transaction that others came in between of is repeated
CONNECT_SECONDS: Final = 5
_MIGRATING: Final = 0x636F7365727665  # key of the advisory lock under which one server migrates
_AGAIN: Final = ("40001", "40P01")  # serialization_failure, deadlock_detected
_TWICE: Final = "23505"  # unique_violation: of two that looked for a name at once, one comes too late
_PAUSE_AT_LAST: Final = 0.2
# A server that hangs within a transaction must not keep others from their rows, nor one wait for ever.
_OPTIONS: Final = (
    "-c idle_in_transaction_session_timeout=10000 -c lock_timeout=10000 -c statement_timeout=60000"
)
_NOW: Final = text("SELECT extract(epoch FROM clock_timestamp())")


class PostgresDatabase(Database):
    """The database at a URL as `postgresql://user@host:5432/name`. libpq's parameters may follow it
    (`?sslmode=require`), and its environment holds: a password is better in ~/.pgpass than in the URL.

    Raises ConfigError for a URL that is none, or without the driver.
    """

    def __init__(self, url: str) -> None:
        parsed = parse(url)
        self._name = masked(parsed.render_as_string(hide_password=True))
        try:
            reads, writes = _engine(parsed, READERS, "REPEATABLE READ"), _engine(parsed, 1, "SERIALIZABLE")
        except ImportError as error:
            raise ConfigError(
                "database names a PostgreSQL server, whose driver is not installed: pip install "
                "'coserve[postgres]'"
            ) from error
        super().__init__(reads.execution_options(postgresql_readonly=True), writes)
        try:
            # What has been committed while it waited for the lock has to be seen.
            with writes.execution_options(isolation_level="READ COMMITTED").begin() as connection:
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text("SET LOCAL lock_timeout = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATING})
                migrate(connection, self._name)
                self._note(float(connection.scalar(_NOW) or 0.0))
        except DBAPIError as error:
            self.close()
            raise cannot_be_used(self._name, _said(error)) from error
        except StateError:
            self.close()
            raise

    def now(self, session: Session) -> float:
        """The clock of the database's server, in seconds."""
        return self._note(float(session.scalar(_NOW)))

    def clock(self) -> float:
        """The clock of the database's server, as `now` last told it: it goes on by this process' monotonic
        clock, so one of this machine that is set wrong, or jumps, decides nothing."""
        return time.monotonic() + self._ahead

    def _note(self, now: float) -> float:
        self._ahead = now - time.monotonic()
        return now

    def _run(self, engine: Engine, work: Callable[[Session], R]) -> R:
        until, pause, broke, twice = time.monotonic() + RETRY_SECONDS, 0.002, False, 0
        while True:
            is_committing = False
            try:
                with Session(engine, expire_on_commit=False) as session:
                    try:
                        result = work(session)
                        session.flush()
                        is_committing = True
                        session.commit()
                        return result
                    except BaseException:
                        # Without it rows that were flushed would count as stored, and be left out when the
                        # work is repeated.
                        session.rollback()
                        raise
            except DataError as error:
                raise RequestError(f"the database cannot store this: {_said(error)}") from error
            except (OperationalError, InterfaceError, IntegrityError) as error:
                state = getattr(error.orig, "sqlstate", None)
                twice += state == _TWICE
                if isinstance(error, IntegrityError) and (state != _TWICE or twice > 3):
                    raise
                if state in _AGAIN or state == _TWICE:
                    if time.monotonic() > until:
                        raise StateError("the database is busy: others changed the same at once") from error
                    time.sleep(random.uniform(0, pause))
                    pause = min(2 * pause, _PAUSE_AT_LAST)
                elif error.connection_invalidated and not is_committing and not broke:
                    broke = True  # once at once: it may be there again
                else:
                    unknown = "; whether this was stored is not known" if is_committing else ""
                    raise StateError(f"the database cannot be used now: {_said(error)}{unknown}") from error
            except PoolTimeout as error:
                raise StateError("the database cannot be used now: all connections are taken") from error


def parse(url: str) -> URL:
    """The URL of a PostgreSQL database, for SQLAlchemy. Raises ConfigError, without the password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigError("database must be a URL as postgresql://user@host:5432/name") from None
    if parsed.drivername not in SCHEMES:
        raise ConfigError(
            f"database must be a URL as postgresql://user@host:5432/name, not of {parsed.drivername!r}"
        )
    if not parsed.database:
        raise ConfigError(f"database has no name: {masked(parsed.render_as_string(hide_password=True))}")
    return parsed.set(drivername="postgresql+psycopg")


def _engine(url: URL, connections: int, isolation: Any) -> Engine:
    return create_engine(
        url,
        isolation_level=isolation,
        pool_size=connections,
        max_overflow=0,
        pool_pre_ping=True,  # a database that was away gets new connections
        pool_timeout=RETRY_SECONDS,
        json_deserializer=from_json,
        hide_parameters=True,  # of statements in errors, which are logged: prompts and answers
        connect_args={
            "connect_timeout": CONNECT_SECONDS,
            "tcp_user_timeout": 10_000,  # of a network that was cut
            "application_name": "coserve",
            "options": _OPTIONS,
        },
    )


def _said(error: DBAPIError) -> str:
    """The driver's words, in one line."""
    return masked(" ".join(str(error.orig).split()))
