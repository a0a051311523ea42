"""The server's durable store: a database and folders, consistent after any crash.

    coserve.db      rows: a row is there once the method that adds it has returned (or in PostgreSQL)
    files/          uploads and results
    jobs/           each job's checkpoints
    adapters/       finished and imported adapters
    uploads/        parts of uploads that are pending
    batches/        batches under way: their input, and results so far
    tinker/         checkpoints of `tinker` clients, and states from which other servers go on
    usage/          a journal of what was used, until it is in the database

A row's files are on disk, and where other servers find them (`artifacts`), before the row is added, and
deleted after it. One process writes; others (the
command line) may read, and add keys.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from sqlalchemy import select
from sqlalchemy.orm import Session

from coserve.core.job_status import UNFINISHED
from coserve.errors import StateError
from coserve.serve.artifacts.local import ArtifactStore, LocalArtifacts
from coserve.serve.store.adapters import AdapterStore
from coserve.serve.store.audit import AuditStore
from coserve.serve.store.batches import INPUT, UNENDED, BatchStore
from coserve.serve.store.conversations import ConversationStore
from coserve.serve.store.creations import CreationStore
from coserve.serve.store.evals import EvalStore
from coserve.serve.store.files import MOST_EXPIRED, FileStore
from coserve.serve.store.ids import new_id
from coserve.serve.store.job_events import JobEventStore
from coserve.serve.store.job_history import JobHistory
from coserve.serve.store.jobs import JobStore
from coserve.serve.store.leases import Leases
from coserve.serve.store.logins import LoginStore
from coserve.serve.store.opening import open_database
from coserve.serve.store.permissions import PermissionStore
from coserve.serve.store.private import make_private
from coserve.serve.store.quarantine import QuarantineStore
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import (
    Adapter,
    BatchRecord,
    CheckpointRecord,
    File,
    JobRecord,
    TinkerCheckpoint,
    TinkerState,
)
from coserve.serve.store.responses import ResponseStore
from coserve.serve.store.retention import RetentionStore
from coserve.serve.store.run_log import RunLog
from coserve.serve.store.stored_chats import ChatStore
from coserve.serve.store.tenants import TenantStore
from coserve.serve.store.tinker import TinkerCheckpointStore, TinkerSessionStore
from coserve.serve.store.uploads import MOST_EXPIRED_UPLOADS, UploadStore
from coserve.serve.store.usage import UsageStore


def artifacts_of_rows(session: Session) -> dict[str, set[str]]:
    """As `Store.named_artifacts`."""
    known: dict[str, set[str]] = {
        "adapters": set(),
        "tinker": set(),
        "files": set(),
        "jobs": set(),
        "batches": set(),
    }
    for part, paths in (
        ("adapters", Adapter.path),
        ("tinker", TinkerCheckpoint.path),
        ("tinker", TinkerState.path),
        ("jobs", CheckpointRecord.path),
    ):
        known[part] |= {str(path) for path in session.scalars(select(paths))}
    known["files"] |= {f"files/{id}{suffix}" for id, suffix in session.execute(select(File.id, File.suffix))}
    unended = select(BatchRecord.id).where(BatchRecord.status.in_(UNENDED))
    known["batches"] = {f"batches/{id}/{INPUT}" for id in session.scalars(unended)}
    for id in session.scalars(select(JobRecord.id).where(JobRecord.status.in_(UNFINISHED))):
        known["jobs"] |= {f"jobs/{id}/{origin}" for origin in ("start", "teacher")}
    return known


class Store:
    """The durable state of a server, by kind of record. Opening it creates or upgrades the database.

    Methods are asynchronous and take the tenant's id for owned records; other tenants' records are treated as
    missing.

    Raises StateError if the folder is unusable, or the database is of a newer coserve.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] | None = None,
        quotas: Quotas | None = None,
        artifacts: ArtifactStore | None = None,
        database: str = "",
        owner: str = "",
    ) -> None:
        """`database` is the URL of one that several servers share, `owner` this one's name in its leases.
        `clock` is the database's unless given."""
        self.folder = folder.resolve()
        self.artifacts = artifacts or LocalArtifacts()
        try:
            for part in ("", "files", "jobs", "adapters", "batches", "uploads", "tinker", "usage"):
                make_private(self.folder / part)
        except OSError as error:
            raise StateError(f"the state folder {self.folder} cannot be used: {error.strerror}") from error
        self._database = open_database(self.folder, database)
        self.clock = clock = clock or self._database.clock
        quotas = quotas or Quotas()
        self.leases = Leases(self._database, owner or new_id("server"))
        self.tenants = TenantStore(self._database, clock)
        self.logins = LoginStore(self._database, clock)
        self.creations = CreationStore(self._database, clock, quotas)
        self.files = FileStore(self._database, clock, quotas, self.creations, self._put_file)
        self.jobs = JobStore(self._database, clock, quotas, self.creations, self.leases)
        self.job_history = JobHistory(self._database)
        self.uploads = UploadStore(self._database, clock, quotas, self._put_file)
        self.batches = BatchStore(self._database, clock, quotas, self.creations, self._put_file, self.leases)
        self.job_events = JobEventStore(self._database, clock, self.path_of, self.leases)
        self.adapters = AdapterStore(self._database, self.folder, quotas, self.creations, self.artifacts)
        self.evals = EvalStore(self._database, clock, quotas, self.leases)
        self.permissions = PermissionStore(self._database, clock, quotas)
        self.tinker_sessions = TinkerSessionStore(self._database, quotas)
        self.tinker_checkpoints = TinkerCheckpointStore(
            self._database, self.folder, quotas, self.artifacts, self.leases
        )
        self.run_log = RunLog(self._database, self.folder, quotas, self.artifacts, self.leases)
        self.responses = ResponseStore(self._database, quotas, self.leases)
        self.conversations = ConversationStore(self._database, quotas)
        self.chats = ChatStore(self._database, clock, quotas)
        self.usage = UsageStore(self._database, self.folder / "usage", clock)
        self.audit = AuditStore(self._database, clock)
        self.retention = RetentionStore(self._database, self.folder / "jobs", self.artifacts)
        self.quarantine = QuarantineStore(self._database, clock, self.adapters, self.leases)

    def file_path(self, file: File) -> Path:
        """Path of a file's bytes."""
        return self.folder / "files" / f"{file.id}{file.suffix}"

    async def expire_files(self) -> bool:
        """Deletes some of the files and pending uploads that have expired; True where more may be left. The
        rows go last, so that none is forgotten where the server ends in between."""
        expired = await self.files.expired()
        for file in expired:
            await self.artifacts.discard(self.file_path(file))
        await self.files.forget(expired)
        late = await self.uploads.expired()
        for upload in late:
            await self.uploads.end(upload.id, "expired")
            await asyncio.to_thread(shutil.rmtree, self.upload_folder(upload.id), ignore_errors=True)
        return len(expired) == MOST_EXPIRED or len(late) == MOST_EXPIRED_UPLOADS

    async def bring_file(self, file: File) -> Path:
        """Path of a file's bytes, which are there, unless they have been deleted. Raises StateError."""
        return await self.artifacts.get(self.file_path(file))

    async def named_artifacts(self) -> dict[str, set[str]]:
        """Paths of all artifacts that rows name, by their part of the state folder."""
        return await self._database.read(artifacts_of_rows)

    async def _put_file(self, file: File) -> None:
        await self.artifacts.put(self.file_path(file))

    def job_folder(self, job: str) -> Path:
        """Folder for a job's checkpoints."""
        return self.folder / "jobs" / job

    def upload_folder(self, upload: str) -> Path:
        """Folder of a pending upload's parts."""
        return self.folder / "uploads" / upload

    def batch_folder(self, batch: str) -> Path:
        """Folder of a batch under way."""
        return self.folder / "batches" / batch

    def adapter_folder(self, adapter: str) -> Path:
        """Folder of a finished or imported adapter."""
        return self.folder / "adapters" / adapter

    def tinker_folder(self, checkpoint: str) -> Path:
        """Folder of a `tinker` client's checkpoint."""
        return self.folder / "tinker" / checkpoint

    def folder_of(self, row: Adapter | CheckpointRecord) -> Path:
        """Folder of a row's path."""
        return self.folder / row.path

    def path_of(self, folder: Path) -> Path:
        """Path for a row: relative within the state folder, which may be moved."""
        return folder.relative_to(self.folder) if folder.is_relative_to(self.folder) else folder.absolute()

    def close(self) -> None:
        """Waits for running writes and closes the database and the journal."""
        self.usage.close()
        self._database.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
