"""Adapters that can be sampled by name: finished ones, imported ones, and checkpoints."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from sqlalchemy import BindParameter, ColumnElement, Select, and_, bindparam, delete, or_, select, update
from sqlalchemy.orm import Session

from coserve.core.job_status import FINAL
from coserve.errors import ConflictError
from coserve.serve.store.database import Database
from coserve.serve.store.quotas import Quotas, bytes_in
from coserve.serve.store.records import Adapter, CheckpointRecord, JobRecord


def _visible(tenant: str | BindParameter[str], base: str | BindParameter[str]) -> ColumnElement[bool]:
    return and_(Adapter.base == base, or_(Adapter.tenant == tenant, Adapter.tenant.is_(None)))


# Asked for each request: made once, as making a statement takes as long as running it.
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
    """Names that a tenant may put where OpenAI's API has a model."""

    def __init__(self, database: Database, folder: Path, quotas: Quotas) -> None:
        self._database, self._folder, self._quotas = database, folder, quotas

    async def list(self, tenant: str, base: str) -> tuple[Adapter, ...]:
        """The tenant's adapters of a base and those that everybody may use, the oldest first; no
        checkpoints."""
        return await self._all(_visible(tenant, base))

    async def pinned(self, base: str) -> tuple[Adapter, ...]:
        """Adapters of a base that stay in the engine's memory, whoever owns them."""
        return await self._all(and_(Adapter.pinned, Adapter.base == base))

    async def find(self, tenant: str, name: str, base: str) -> Adapter | None:
        """The adapter or checkpoint of a base that this tenant calls `name`; its own come before
        everybody's."""
        wanted = {"tenant": tenant, "name": name, "base": base}
        return await self._database.read(
            lambda session: session.scalar(_NAMED, wanted) or _checkpoint(session, _NAMED_CHECKPOINT, wanted)
        )

    async def get(self, id: str) -> Adapter | None:
        """The adapter or checkpoint with this id, whoever owns it."""
        adapter = select(Adapter).where(Adapter.id == id)
        checkpoint = _CHECKPOINTS.where(CheckpointRecord.id == id)
        return await self._database.read(
            lambda session: session.scalar(adapter) or _checkpoint(session, checkpoint)
        )

    async def add(self, adapter: Adapter) -> bool:
        """Names an uploaded adapter whose folder is on disk; False if this tenant has one of that name, of
        whichever base. Raises QuotaExceeded where its owner has no room for it."""

        def write(session: Session) -> bool:
            if adapter.tenant is not None:
                size = bytes_in(self._folder / adapter.path)
                self._quotas.check_storage(session, self._folder, adapter.tenant, size)
            return add_adapter(session, adapter)

        return await self._database.write(write)

    async def share(self, shared: Sequence[Adapter]) -> None:
        """Makes these, and no others, the adapters that everybody may use."""
        ids = [adapter.id for adapter in shared]

        def write(session: Session) -> None:
            session.execute(delete(Adapter).where(Adapter.tenant.is_(None), Adapter.id.not_in(ids)))
            for adapter in shared:
                add_adapter(session, adapter)

        await self._database.write(write)

    async def sweep(self) -> None:
        """Removes folders that no adapter has: of imports that a killed server did not get to the end of. No
        import may be under way."""
        found = select(Adapter.path)
        known = await self._database.read(
            lambda session: {self._folder / path for path in session.scalars(found)}
        )
        for folder in (self._folder / "adapters").iterdir():
            if folder not in known:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def remove(self, tenant: str, name: str) -> Adapter | None:
        """Forgets the tenant's own adapter `name` and says what it was; None if there is none.

        Its folder is the caller's to delete, if it lies in the state folder. Raises ConflictError while a
        job that began with it is not over.
        """
        own = select(Adapter).where(Adapter.tenant == tenant, Adapter.name == name)

        def write(session: Session) -> Adapter | None:
            found = session.scalar(own)
            if found is None:
                return None
            begun = JobRecord.start_from == found.id
            user = session.scalar(select(JobRecord.id).where(begun, JobRecord.status.not_in(FINAL)))
            if user is not None:
                raise ConflictError(f"{name} is where the job {user} begins: wait for its end, or cancel it")
            session.delete(found)
            return found

        return await self._database.write(write)

    async def pin(self, id: str, pinned: bool) -> None:
        """Notes whether an adapter stays in the engine's memory."""
        changed = update(Adapter).where(Adapter.id == id).values(pinned=pinned)
        await self._database.write(lambda session: session.execute(changed))

    async def _all(self, wanted: ColumnElement[bool]) -> tuple[Adapter, ...]:
        found = select(Adapter).where(wanted).order_by(Adapter.number)
        return await self._database.read(lambda session: tuple(session.scalars(found)))


def add_adapter(session: Session, adapter: Adapter) -> bool:
    """Adds the row; False if its owner has that name already."""
    same = Adapter.tenant.is_not_distinct_from(adapter.tenant) & (Adapter.name == adapter.name)
    if session.scalar(select(Adapter.id).where(same)) is not None:
        return False
    session.add(adapter)
    return True


def _checkpoint(
    session: Session, query: Select[CheckpointRecord, JobRecord], wanted: Mapping[str, str] = {}
) -> Adapter | None:
    """The first checkpoint that is found, as an adapter that is in no table."""
    row = session.execute(query, wanted).first()
    if row is None:
        return None
    one, job = row
    return Adapter(
        one.id, one.name, one.path, job.base, one.created, job.tenant, job.model, one.job, one.step
    )
