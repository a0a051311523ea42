"""Quotas of a tenant: storage and unfinished jobs."""

import sys
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coserve.core.job_status import FINAL
from coserve.errors import QuotaExceeded
from coserve.serve.store.records import Adapter, File, JobRecord, TinkerCheckpoint

_HOW = "delete some (DELETE /v1/files/ID, DELETE /v1/models/NAME) before you upload more."


@dataclass(frozen=True, slots=True)
class Quotas:
    """A tenant's limits, checked in the transaction that adds something, so that concurrent requests cannot
    exceed them together.

    Raises QuotaExceeded. The server's own additions, such as a job's adapter and results, are never refused.
    """

    files: int = sys.maxsize  # uploaded files and adapters
    bytes: int = sys.maxsize  # of these and of result files
    jobs: int = sys.maxsize  # that are not over

    def check_storage(self, session: Session, folder: Path, tenant: str, size: int, number: int = 1) -> None:
        """Raises QuotaExceeded where `number` more uploads of `size` bytes in all have no room; `folder` is
        the state folder."""
        own = select(Adapter.path).where(Adapter.tenant == tenant, Adapter.job.is_(None))
        uploaded = [bytes_in(folder / path) for path in session.scalars(own)]
        owned = select(func.count(), func.coalesce(func.sum(File.bytes), 0)).where(File.tenant == tenant)
        _, stored = session.execute(owned).one()
        has, _ = session.execute(owned.where(File.purpose == "fine-tune")).one()
        saved = select(func.coalesce(func.sum(TinkerCheckpoint.bytes), 0))
        checkpoint_bytes = session.scalars(saved.where(TinkerCheckpoint.tenant == tenant)).one()
        has += len(uploaded)
        stored += sum(uploaded) + checkpoint_bytes
        if has + number > self.files:
            raise QuotaExceeded(
                f"You have {has} files and uploaded adapters, with those under way {has + number}, and may "
                f"have {self.files}: {_HOW}"
            )
        if stored + size > self.bytes:
            raise QuotaExceeded(
                f"Your files, uploaded adapters and checkpoints have {stored} bytes, with what is under way "
                f"{stored + size}, and may have {self.bytes}: {_HOW}"
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


def bytes_in(folder: Path) -> int:
    """Bytes of a folder's files; 0 if it is missing."""
    try:
        return sum(file.stat().st_size for file in folder.iterdir())
    except OSError:  # being deleted
        return 0
