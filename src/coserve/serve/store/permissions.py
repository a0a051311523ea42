"""Rows of permissions: tenants that may use another one's checkpoint."""

from collections.abc import Callable, Sequence
from typing import Final

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from coserve.errors import QuotaExceeded
from coserve.serve.store.adapters import checkpoint_named
from coserve.serve.store.database import Database, page_of, reads, writes
from coserve.serve.store.ids import new_id
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import (
    Adapter,
    CheckpointPermission,
    CheckpointRecord,
    JobRecord,
    Page,
)

MOST_PERMISSIONS: Final = 100  # of one checkpoint
_PERMITTED: Final = (
    select(CheckpointRecord, JobRecord)
    .join(JobRecord, CheckpointRecord.job == JobRecord.id)
    .join(
        CheckpointPermission,
        (CheckpointPermission.checkpoint == CheckpointRecord.name)
        & (CheckpointPermission.tenant == JobRecord.tenant),
    )
    .where(
        CheckpointPermission.project == bindparam("tenant"),
        CheckpointRecord.name == bindparam("name"),
        JobRecord.base == bindparam("base"),
    )
    .limit(1)
)


class PermissionStore:
    """Permissions by the tenant that gave them. `project` is the id of the tenant that has one."""

    def __init__(self, database: Database, clock: Callable[[], float], quotas: Quotas) -> None:
        self._database, self._clock, self._quotas = database, clock, quotas

    @reads
    def permitted(self, session: Session, tenant: str, name: str, base: str) -> Adapter | None:
        """The checkpoint `name` of a base whose owner lets this tenant use it, as an adapter."""
        wanted = {"tenant": tenant, "name": name, "base": base}
        return checkpoint_named(session, _PERMITTED, wanted)

    @writes
    def add(
        self, session: Session, tenant: str, checkpoint: str, projects: Sequence[str]
    ) -> tuple[CheckpointPermission, ...]:
        """Gives projects a permission; those that have one keep it. Raises QuotaExceeded."""
        known = {one.project: one for one in session.scalars(_of(tenant, checkpoint))}
        fresh = [one for one in dict.fromkeys(projects) if one not in known]
        if len(known) + len(fresh) > MOST_PERMISSIONS:
            raise QuotaExceeded(
                f"A checkpoint may have {MOST_PERMISSIONS} permissions, and {checkpoint} has {len(known)}"
            )
        for project in fresh:
            now = int(self._clock())
            known[project] = CheckpointPermission(new_id("cp"), tenant, checkpoint, project, now)
            session.add(known[project])
        self._quotas.check_kept(session, tenant)
        return tuple(known[project] for project in dict.fromkeys(projects))

    @reads
    def page(
        self,
        session: Session,
        tenant: str,
        checkpoint: str,
        project: str | None,
        after: str | None,
        limit: int,
        ascending: bool,
    ) -> Page[CheckpointPermission] | None:
        """Permissions of a tenant's checkpoint; None if there is none with the id `after`."""
        own = [CheckpointPermission.tenant == tenant, CheckpointPermission.checkpoint == checkpoint]
        wanted = [] if project is None else [CheckpointPermission.project == project]
        return page_of(session, CheckpointPermission, own, after, limit, ascending, filters=wanted)

    @writes
    def remove(self, session: Session, tenant: str, checkpoint: str, id: str) -> bool:
        """Removes a permission; False if the tenant has given none with this id."""
        found = session.scalar(_of(tenant, checkpoint).where(CheckpointPermission.id == id))
        if found is not None:
            session.delete(found)
        return found is not None


def _of(tenant: str, checkpoint: str):  # type: ignore[no-untyped-def]
    return select(CheckpointPermission).where(
        CheckpointPermission.tenant == tenant, CheckpointPermission.checkpoint == checkpoint
    )
