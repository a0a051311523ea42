"""Quotas of a tenant: everything that the server keeps of it, and unfinished jobs."""

import sys
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coserve.core.job_status import FINAL
from coserve.errors import QuotaExceeded
from coserve.serve.store.records import Adapter, File, JobRecord, TenantRows

UPLOADED = ("fine-tune", "batch", "evals")  # purposes of uploads
_HOW = "delete some (DELETE /v1/files/ID, DELETE /v1/models/NAME) before you upload more."


@dataclass(slots=True)
class Quotas:
    """A tenant's limits, checked in the transaction that adds something, so that concurrent requests cannot
    exceed them together.

    Bytes and rows are those of all tables that a tenant's requests add to, with the files of their rows:
    triggers of the database count them (`TenantRows`), whatever adds, changes or deletes a row. Raises
    QuotaExceeded. The server's own additions, such as a job's adapter, events and results, are counted and
    never refused.
    """

    files: int = sys.maxsize  # uploaded files and adapters
    bytes: int = sys.maxsize  # of everything that is kept
    jobs: int = sys.maxsize  # that are not over
    rows: int = sys.maxsize  # of everything that is kept: names, events and other records without files
    creations: int = 10_000  # idempotency keys that are remembered, the newest
    creation_seconds: float = 86_400.0  # for which they are

    def change(self, other: "Quotas") -> None:
        """Takes over the limits of another one; what is kept beyond them stays."""
        for limit in fields(self):
            setattr(self, limit.name, getattr(other, limit.name))

    def check_storage(self, session: Session, tenant: str, size: int, number: int = 1) -> None:
        """Raises QuotaExceeded where `number` more uploads of `size` bytes in all have no room."""
        uploads = select(func.count()).where(File.tenant == tenant, File.purpose.in_(UPLOADED))
        adapters = select(func.count()).where(Adapter.tenant == tenant, Adapter.job.is_(None))
        has = session.scalars(uploads).one() + session.scalars(adapters).one()
        if has + number > self.files:
            raise QuotaExceeded(
                f"You have {has} files and uploaded adapters, with those under way {has + number}, and may "
                f"have {self.files}: {_HOW}"
            )
        self.check_kept(session, tenant, size, number)

    def check_kept(self, session: Session, tenant: str, size: int = 0, number: int = 0) -> None:
        """Raises QuotaExceeded where the tenant may not keep `size` bytes and `number` rows beside what this
        transaction has written."""
        session.flush()
        found = select(
            func.coalesce(func.sum(TenantRows.rows), 0), func.coalesce(func.sum(TenantRows.bytes), 0)
        )
        rows, stored = session.execute(found.where(TenantRows.tenant == tenant)).one()
        if stored + size > self.bytes:
            raise QuotaExceeded(
                "Your files, adapters, checkpoints and records have "
                f"{stored} bytes, with what is under way {stored + size}, and may have {self.bytes}: {_HOW}"
            )
        if rows + number > self.rows:
            raise QuotaExceeded(
                f"The server has {rows + number} records of you (jobs and their events, sessions, samplers, "
                f"runs, checkpoints, files) and may keep {self.rows}: those of ended work go with time, and "
                "deleting files, models and checkpoints makes room."
            )

    def check_jobs(self, session: Session, tenant: str) -> None:
        """Raises QuotaExceeded where the tenant may have no further job."""
        found = select(func.count()).where(JobRecord.tenant == tenant, JobRecord.status.not_in(FINAL))
        has = session.scalars(found).one()
        if has >= self.jobs:
            raise QuotaExceeded(
                f"You have {has} fine-tuning jobs that are not over, and may have {self.jobs}: wait until "
                "one has ended, or cancel one."
            )


def bytes_in(folder: Path, but: Collection[str] = ()) -> int:
    """Bytes of a folder's files, but for those of these names; 0 if it is missing."""
    try:
        return sum(file.stat().st_size for file in folder.iterdir() if file.name not in but)
    except OSError:  # being deleted
        return 0
