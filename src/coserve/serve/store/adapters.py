"""Adapters that requests can name: trained ones, imported ones, and checkpoints."""

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from sqlalchemy import BindParameter, ColumnElement, Select, and_, bindparam, delete, or_, select
from sqlalchemy.orm import Session

from coserve.core.job_status import FINAL
from coserve.errors import ConflictError
from coserve.serve.artifacts.local import ArtifactStore
from coserve.serve.store.audit import note_action
from coserve.serve.store.creations import CreationStore
from coserve.serve.store.database import Database, page_of, reads, writes
from coserve.serve.store.durable import RESUMING
from coserve.serve.store.quotas import Quotas, bytes_in
from coserve.serve.store.records import Adapter, CheckpointRecord, JobRecord, Page


def _visible(tenant: str | BindParameter[str], base: str | BindParameter[str]) -> ColumnElement[bool]:
    return and_(Adapter.base == base, or_(Adapter.tenant == tenant, Adapter.tenant.is_(None)))


# Run for each request: made once, as making a statement takes as long as running it.
_NAMED: Final = (
    select(Adapter)
    .where(_visible(bindparam("tenant"), bindparam("base")), Adapter.name == bindparam("name"))
    .order_by(Adapter.tenant.is_(None))
    .limit(1)
)
_CHECKPOINTS: Final = (
    select(CheckpointRecord, JobRecord).join(JobRecord, CheckpointRecord.job == JobRecord.id).limit(1)
)
_NAMED_CHECKPOINT: Final = _CHECKPOINTS.where(
    JobRecord.tenant == bindparam("tenant"),
    JobRecord.base == bindparam("base"),
    CheckpointRecord.name == bindparam("name"),
)


class AdapterStore:
    """Adapters by the names that a tenant may use as `model`."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        quotas: Quotas,
        creations: CreationStore,
        artifacts: ArtifactStore,
    ) -> None:
        self._database, self._folder, self._quotas, self._creations = database, folder, quotas, creations
        self._artifacts = artifacts

    async def list(self, tenant: str, base: str) -> tuple[Adapter, ...]:
        """The tenant's and the shared adapters of a base, the oldest first, without checkpoints."""
        return await self._all(_visible(tenant, base))

    @reads
    def page(
        self, session: Session, tenant: str, bases: Sequence[str], after: str | None, limit: int
    ) -> Page[Adapter] | None:
        """The tenant's and the shared adapters of these bases after the one named `after`, the newest first,
        without checkpoints; None if there is none of that name."""
        wanted = (Adapter.base.in_(bases), or_(Adapter.tenant == tenant, Adapter.tenant.is_(None)))
        id = after and session.scalar(
            select(Adapter.id).where(*wanted, Adapter.name == after).order_by(Adapter.tenant.is_(None))
        )
        return None if after and id is None else page_of(session, Adapter, wanted, id, limit)

    async def pinned(self, base: str) -> tuple[Adapter, ...]:
        """Pinned adapters of a base, of all tenants."""
        return await self._all(and_(Adapter.pinned, Adapter.base == base))

    @reads
    def find(self, session: Session, tenant: str, name: str, base: str) -> Adapter | None:
        """The tenant's adapter or checkpoint `name` of a base; own ones take precedence over shared ones."""
        wanted = {"tenant": tenant, "name": name, "base": base}
        return session.scalar(_NAMED, wanted) or checkpoint_named(session, _NAMED_CHECKPOINT, wanted)

    @reads
    def get(self, session: Session, id: str) -> Adapter | None:
        """The adapter or checkpoint with this id, of any tenant."""
        adapter = select(Adapter).where(Adapter.id == id)
        checkpoint = _CHECKPOINTS.where(CheckpointRecord.id == id)
        return session.scalar(adapter) or checkpoint_named(session, checkpoint)

    async def add(self, adapter: Adapter) -> bool:
        """Adds an uploaded adapter whose folder is on disk; False if the tenant has one of that name, for any
        base. Raises QuotaExceeded, and StateError where the artifact store is away."""
        await self._artifacts.put(self._folder / adapter.path)
        return await self._database.write(lambda session: self._add(session, adapter))

    async def replace(self, adapter: Adapter) -> Adapter | None:
        """As `add`, in the place of the tenant's adapter of that name, which it returns; None if there is
        none. Raises what `remove` and `add` do; then the old one stays."""
        await self._artifacts.put(self._folder / adapter.path)

        def write(session: Session) -> Adapter | None:
            assert adapter.tenant is not None, "shared adapters are those of the settings"
            old = _remove(session, adapter.tenant, adapter.name)
            session.flush()  # a name is unique
            self._add(session, adapter)
            return old

        return await self._database.write(write)

    def _add(self, session: Session, adapter: Adapter) -> bool:
        if adapter.tenant is not None:
            adapter.bytes = bytes_in(self._folder / adapter.path)
            self._quotas.check_storage(session, adapter.tenant, adapter.bytes)
        if not add_adapter(session, adapter):
            return False
        self._creations.note(session, f"/v1/models/{adapter.name}")
        note_action(
            session, adapter.created, "adapter.created", adapter.name, adapter.tenant or "", adapter.id
        )
        return True

    @writes
    def share(self, session: Session, shared: Sequence[Adapter]) -> None:
        """Replaces the set of shared adapters."""
        ids = [adapter.id for adapter in shared]
        session.execute(delete(Adapter).where(Adapter.tenant.is_(None), Adapter.id.not_in(ids)))
        for adapter in shared:
            add_adapter(session, adapter)

    async def sweep(self) -> None:
        """Removes folders without an adapter, left by imports of a killed server, and counts the bytes of
        adapters and checkpoints of an earlier version. No import may be under way."""
        await self._database.write(self._count_bytes)
        found = select(Adapter.path)
        known = await self._database.read(
            lambda session: {self._folder / path for path in session.scalars(found)}
        )
        for folder in (self._folder / "adapters").iterdir():
            if folder not in known:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _count_bytes(self, session: Session) -> None:
        adapters = session.scalars(select(Adapter).where(Adapter.bytes == 0))
        checkpoints = session.scalars(select(CheckpointRecord).where(CheckpointRecord.bytes == 0))
        for row in (*adapters, *checkpoints):
            row.bytes = bytes_in(self._folder / row.path, RESUMING)

    @writes
    def remove(self, session: Session, tenant: str, name: str) -> Adapter | None:
        """Removes the tenant's own adapter `name` and returns it; None if there is none.

        The caller deletes its folder, if that is in the state folder. Raises ConflictError while an
        unfinished job starts from it or learns from it.
        """
        return _remove(session, tenant, name)

    @writes
    def pin(self, session: Session, id: str, pinned: bool) -> None:
        """Stores whether an adapter is pinned."""
        found = session.scalar(select(Adapter).where(Adapter.id == id))
        if found is not None and found.pinned != pinned:
            found.pinned = pinned
            action = "adapter.pinned" if pinned else "adapter.unpinned"
            note_action(session, int(time.time()), action, found.name, found.tenant or "", id)

    @reads
    def _all(self, session: Session, wanted: ColumnElement[bool]) -> tuple[Adapter, ...]:
        return tuple(session.scalars(select(Adapter).where(wanted).order_by(Adapter.number)))


def add_adapter(session: Session, adapter: Adapter) -> bool:
    """Adds a row; False if its owner has that name already."""
    same = Adapter.tenant.is_not_distinct_from(adapter.tenant) & (Adapter.name == adapter.name)
    if session.scalar(select(Adapter.id).where(same)) is not None:
        return False
    session.add(adapter)
    return True


def _remove(session: Session, tenant: str, name: str) -> Adapter | None:
    """As `AdapterStore.remove`."""
    found = session.scalar(select(Adapter).where(Adapter.tenant == tenant, Adapter.name == name))
    if found is None:
        return None
    for needed, what in (
        (JobRecord.start_from == found.id, "is where the job {} begins"),
        (JobRecord.options["teacher"].as_string() == found.id, "teaches in the job {}"),
    ):
        user = session.scalar(select(JobRecord.id).where(needed, JobRecord.status.not_in(FINAL)))
        if user is not None:
            raise ConflictError(f"{name} {what.format(user)}: wait for its end, or cancel it")
    session.delete(found)
    note_action(session, int(time.time()), "adapter.deleted", name, tenant, found.id)
    return found


def checkpoint_named(
    session: Session, query: Select[CheckpointRecord, JobRecord], wanted: Mapping[str, str] = {}
) -> Adapter | None:
    """The first checkpoint of a query, as an adapter outside of the session."""
    row = session.execute(query, wanted).first()
    if row is None:
        return None
    one, job = row
    return Adapter(
        one.id, one.name, one.path, job.base, one.created, job.tenant, job.model, one.job, one.step
    )
