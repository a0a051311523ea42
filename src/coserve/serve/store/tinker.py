"""Rows of `tinker` clients: sessions with their samplers and runs, and checkpoints."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, delete, func, or_, select, union_all, update
from sqlalchemy.orm import Session

from coserve.serve.artifacts.local import ArtifactStore
from coserve.serve.store.database import Database, owned, reads, writes
from coserve.serve.store.leases import Leases
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import (
    Adapter,
    Record,
    TinkerCheckpoint,
    TinkerRequest,
    TinkerRun,
    TinkerSampler,
    TinkerSession,
    TinkerState,
)

R = TypeVar("R", bound=Record)
LEASED: Final = "tinker"  # the kind of leases of open runs
SCHEME: Final = "tinker://"
KINDS: Final = ("weights", "sampler_weights", "external_weights")


def parse_path(path: str) -> tuple[str, str, str] | None:
    """The run, kind and name of `tinker://RUN/KIND/NAME`; None for anything else."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS or not all(parts):
        return None
    return parts[0], parts[1], parts[2]


class TinkerSessionStore:
    """Sessions of a tenant, their samplers and training runs."""

    def __init__(self, database: Database, quotas: Quotas) -> None:
        self._database, self._quotas = database, quotas

    @writes
    def add(self, session: Session, row: TinkerSession | TinkerSampler | TinkerRun) -> bool:
        """Adds a row; False if there is one with this id. Raises QuotaExceeded."""
        kind = type(row)
        if session.scalar(select(kind.id).where(kind.id == row.id)) is not None:
            return False
        session.add(row)
        self._quotas.check_kept(session, row.tenant)
        return True

    @reads
    def get(self, session: Session, kind: type[R], tenant: str, id: str) -> R | None:
        """The tenant's row of a kind with this id."""
        return session.scalar(select(kind).where(*_of(kind, tenant), kind.id == id))

    @reads
    def page(
        self,
        session: Session,
        kind: type[R],
        tenant: str,
        offset: int,
        limit: int,
        *wanted: ColumnElement[bool],
    ) -> tuple[Sequence[R], int]:
        """The tenant's rows that meet all conditions, the newest first, and their number in all."""
        conditions = (*_of(kind, tenant), *wanted)
        rows = select(kind).where(*conditions).order_by(kind.number.desc()).offset(offset).limit(limit)
        count = select(func.count()).select_from(kind).where(*conditions)
        return (tuple(session.scalars(rows)), session.scalars(count).one())

    @reads
    def ids(
        self,
        session: Session,
        kind: type[R],
        tenant: str,
        offset: int,
        limit: int,
        *wanted: ColumnElement[bool],
    ) -> Sequence[str]:
        """As `page`, of the rows' ids alone: their metadata are not read."""
        found = select(kind.id).where(*_of(kind, tenant), *wanted).order_by(kind.number.desc())
        return tuple(session.scalars(found.offset(offset).limit(limit)))

    @writes
    def change(self, session: Session, /, kind: type[R], id: str, **values: Any) -> None:
        """Changes columns of the row with this id."""
        session.execute(update(kind).where(kind.id == id).values(**values))

    @writes
    def finish(self, session: Session, tenant: str, id: str, reason: Mapping[str, Any]) -> bool:
        """Notes why a session ended, unless that is known; False if the tenant has no such session."""
        found = owned(session, TinkerSession, tenant, id)
        if found is not None and found.finished is None:
            found.finished = dict(reason)
        return found is not None


class TinkerCheckpointStore:
    """Checkpoints: the tenant's own, and those that others have published."""

    def __init__(
        self, database: Database, folder: Path, quotas: Quotas, artifacts: ArtifactStore, leases: Leases
    ) -> None:
        self._database, self._folder, self._quotas = database, folder, quotas
        self._artifacts, self._leases = artifacts, leases

    @reads
    def find(
        self, session: Session, tenant: str, path: str, now: float, own: bool = False
    ) -> TinkerCheckpoint | None:
        """The checkpoint at a `tinker://` path that the tenant may read, or with `own` change."""
        named = parse_path(path)
        if named is None:
            return None
        run, kind, name = named
        readable = TinkerCheckpoint.tenant == tenant
        found = select(TinkerCheckpoint).where(
            TinkerCheckpoint.run == run,
            TinkerCheckpoint.kind == kind,
            TinkerCheckpoint.name == name,
            readable if own else or_(readable, TinkerCheckpoint.public),
            _lasting(now),
        )
        return session.scalar(found)

    @reads
    def get(self, session: Session, id: str) -> TinkerCheckpoint | None:
        """The checkpoint with this id, of any tenant."""
        return session.scalar(select(TinkerCheckpoint).where(TinkerCheckpoint.id == id))

    @reads
    def page(
        self,
        session: Session,
        tenant: str,
        now: float,
        run: str | None = None,
        offset: int = 0,
        limit: int | None = None,
    ) -> tuple[Sequence[TinkerCheckpoint], int]:
        """The tenant's lasting checkpoints (of one run), the newest first, and their number in all."""
        wanted = [*_listed(tenant, now)]
        if run is not None:
            wanted.append(TinkerCheckpoint.run == run)
        rows = select(TinkerCheckpoint).where(*wanted).order_by(TinkerCheckpoint.number.desc())
        count = select(func.count()).select_from(TinkerCheckpoint).where(*wanted)
        return (
            tuple(session.scalars(rows.offset(offset).limit(limit))),
            session.scalars(count).one(),
        )

    @reads
    def newest(
        self, session: Session, tenant: str, now: float, runs: Sequence[str]
    ) -> Mapping[tuple[str, str], TinkerCheckpoint]:
        """The newest lasting checkpoint of each run and kind, as far as there is one, by both."""
        wanted = [TinkerCheckpoint.run.in_(runs), *_listed(tenant, now)]
        number = func.max(TinkerCheckpoint.number)
        newest = select(number).where(*wanted).group_by(TinkerCheckpoint.run, TinkerCheckpoint.kind)
        rows = session.scalars(select(TinkerCheckpoint).where(TinkerCheckpoint.number.in_(newest)))
        return {(row.run, row.kind): row for row in rows}

    @reads
    def check_room(self, session: Session, tenant: str) -> None:
        """Raises QuotaExceeded where the tenant may store nothing more."""
        self._quotas.check_storage(session, tenant, 1)

    async def add(
        self,
        row: TinkerCheckpoint,
        replace: bool = False,
        copied: bool = False,
        outcome: tuple[int, dict[str, Any]] | None = None,
    ) -> TinkerCheckpoint | None:
        """Adds a checkpoint whose folder is on disk, and returns the one that it replaces. It is of a run of
        this server, unless it was `copied`, and the `outcome` of the run's request with a number.

        Raises FileExistsError for a path in use unless `replace`, QuotaExceeded, LeaseLost where another
        server has told that the run is lost, and StateError where the artifact store is away.
        """
        await self._artifacts.put(self._folder / row.path)

        def write(session: Session) -> TinkerCheckpoint | None:
            if not copied:
                self._leases.require(session, LEASED, row.run)
            self._quotas.check_storage(session, row.tenant, row.bytes)
            same = select(TinkerCheckpoint).where(
                TinkerCheckpoint.run == row.run,
                TinkerCheckpoint.kind == row.kind,
                TinkerCheckpoint.name == row.name,
            )
            before = session.scalar(same)
            if before is not None and before.id == row.id:
                return None  # it was stored, and the connection broke before that could be told
            if before is not None:
                if not replace:
                    raise FileExistsError(row.tinker_path)
                session.delete(before)
                session.flush()
            session.add(row)
            if outcome is not None:
                note_outcome(session, row.run, *outcome)
            return before

        return await self._database.write(write)

    @writes
    def change(self, session: Session, /, id: str, **values: Any) -> None:
        """Changes whether a checkpoint is public or when it expires."""
        session.execute(update(TinkerCheckpoint).where(TinkerCheckpoint.id == id).values(**values))

    async def remove(self, id: str) -> None:
        """Removes a row, and then its folder."""

        def write(session: Session) -> Path | None:
            found = session.scalar(select(TinkerCheckpoint).where(TinkerCheckpoint.id == id))
            if found is None:
                return None
            session.delete(found)
            if found.temporary:  # nobody can sample from it any more
                named = TinkerSampler.tenant == found.tenant, TinkerSampler.model == found.tinker_path
                run = session.scalar(select(TinkerRun.session).where(TinkerRun.id == found.run))
                session.execute(delete(TinkerSampler).where(*named, TinkerSampler.session == run))
            return found.path

        path = await self._database.write(write)
        if path is not None:
            await self._artifacts.discard(self._folder / path)

    @reads
    def outdated(self, session: Session, now: float) -> Sequence[TinkerCheckpoint]:
        """Checkpoints of all tenants that have expired."""
        return tuple(session.scalars(select(TinkerCheckpoint).where(TinkerCheckpoint.expires <= now)))

    @reads
    def temporary(self, session: Session, session_id: str | None = None) -> Sequence[TinkerCheckpoint]:
        """Temporary checkpoints, of one session or of all, the oldest first."""
        found = select(TinkerCheckpoint).where(TinkerCheckpoint.temporary).order_by(TinkerCheckpoint.number)
        if session_id is not None:
            found = found.join(TinkerRun, TinkerCheckpoint.run == TinkerRun.id).where(
                TinkerRun.session == session_id
            )
        return tuple(session.scalars(found))

    async def sweep(self, folder: Path) -> None:
        """Removes temporary checkpoints and folders without a row, left by a killed server, but for those of
        runs that go on. Temporary ones of other servers are not in this one's folder."""
        goes_on = select(TinkerRequest.run).where(TinkerRequest.number == 0).distinct()
        runs = await self._database.read(lambda session: frozenset(session.scalars(goes_on)))
        for row in await self.temporary():
            if row.run not in runs and await asyncio.to_thread((self._folder / row.path).exists):
                await self.remove(row.id)
        paths = union_all(select(TinkerCheckpoint.path), select(TinkerState.path))
        known = await self._database.read(
            lambda session: {self._folder / path for path in session.scalars(paths)}
        )
        for entry in folder.iterdir():
            if entry not in known:
                await asyncio.to_thread(shutil.rmtree, entry, ignore_errors=True)


def as_adapter(row: TinkerCheckpoint) -> Adapter:
    """A checkpoint as an adapter that requests can name, outside of any session."""
    return Adapter(row.id, row.tinker_path, row.path, row.base, row.created, row.tenant)


def _of(kind: type[R], tenant: str) -> tuple[ColumnElement[bool], ...]:
    owner: ColumnElement[str] = kind.__table__.c.tenant
    return (owner == tenant,)


def _lasting(now: float) -> ColumnElement[bool]:
    return or_(TinkerCheckpoint.expires.is_(None), TinkerCheckpoint.expires > now)


def _listed(tenant: str, now: float) -> tuple[ColumnElement[bool], ...]:
    return TinkerCheckpoint.tenant == tenant, ~TinkerCheckpoint.temporary, _lasting(now)


def note_outcome(session: Session, run: str, number: int, outcome: dict[str, Any]) -> None:
    """Notes in a transaction what the client of a run's request is told: nobody carries it out again."""
    own = TinkerRequest.run == run, TinkerRequest.number == number, TinkerRequest.part == 0
    session.execute(update(TinkerRequest).where(*own).values(outcome=outcome))
