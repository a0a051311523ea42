"""Usage by hour, tenant, key, model and version.

Each call's figures are a line of a journal before the client has the end of its answer. The line is with the
system then: the death of a process loses none, a power cut those of the last seconds. Every few seconds the
lines of a segment are added up in the database, in the transaction that marks the segment as merged, so that
no line counts twice.
"""

import asyncio
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Select, delete, func, select
from sqlalchemy.orm import Session

from coserve.errors import CoserveError
from coserve.serve.store.database import Database, reads, writes
from coserve.serve.store.durable import write_whole
from coserve.serve.store.ids import new_id
from coserve.serve.store.records import MergedSegment, TenantRows, UsageRecord
from coserve.wire.logs import context

HOUR: Final = 3600
MERGE_SECONDS: Final = 5.0  # between two merges of the journal
_ROOM: Final = 2**20  # bytes of lines that wait for a disk that is full; further ones are lost
COUNTS: Final = ("requests", "input_tokens", "cached_tokens", "output_tokens", "trained_tokens")
GROUPS: Final = ("tenant", "key", "model", "version")

log = logging.getLogger(__name__)


class Used(NamedTuple):
    """Usage of one call; `cached_tokens` are among the `input_tokens`."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    trained_tokens: int = 0


class UsageStore:
    """The journal and the table of usage. For one event loop, but for `close`."""

    def __init__(self, database: Database, folder: Path, clock: Callable[[], float]) -> None:
        self._database, self._folder, self._clock = database, folder, clock
        self._file: int | None = None  # the open segment
        self._unsaved = b""
        self._merging = asyncio.Lock()
        self._next: int | None = None  # the number of the next segment
        self._journal = ""  # its name: other servers have journals of their own

    def add(self, tenant: str, model: str, version: str, used: Used) -> None:
        """Appends a line for a call of the tenant with this id, in the present context."""
        hour = int(self._clock()) // HOUR * HOUR
        line = json.dumps([hour, tenant, context().key, model, version, *used]).encode() + b"\n"
        if len(self._unsaved) < _ROOM:
            self._unsaved += line
        if self._next is not None:
            self._save()

    def _save(self) -> None:
        """Writes the lines that wait, as far as the disk takes them; the rest goes on where that ended."""
        try:
            written = os.write(self._segment(), self._unsaved)
        except OSError as error:
            log.warning("usage cannot be written down, and waits in memory: %s", error)
        else:
            self._unsaved = self._unsaved[written:]

    def _segment(self) -> int:
        if self._file is None:
            assert self._next is not None
            path = self._folder / f"{self._next}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._next += 1
        return self._file

    async def open(self) -> None:
        """Merges what an earlier process has left. Before, lines wait in memory."""
        self._journal = await asyncio.to_thread(self._name)
        merged = await self._database.read(partial(_merged, journal=self._journal))
        self._next = max([merged, *self._segments()]) + 1
        await self.merge()

    async def merge(self) -> None:
        """Adds the journal's lines to the table."""
        async with self._merging:
            if self._unsaved:
                self._save()
            if self._unsaved:  # its last line goes on in the same segment
                return
            self.close()
            for number in self._segments():  # later ones are not among them
                path = self._folder / f"{number}.jsonl"
                sums = await asyncio.to_thread(_sums, path)
                await self._database.write(partial(_merge, journal=self._journal, segment=number, sums=sums))
                path.unlink(missing_ok=True)

    async def run(self) -> None:
        """Merges every few seconds until cancelled."""
        while True:
            await asyncio.sleep(MERGE_SECONDS)
            try:
                await self.merge()
                await self._database.write(lambda session: note_kept(session, int(self._clock())))
            except (CoserveError, OSError) as error:
                log.warning("usage cannot be added up now: %s", error)

    @reads
    def rows(
        self,
        session: Session,
        since: int,
        until: int,
        width: int = HOUR,
        groups: Sequence[str] = GROUPS,
        tenant: str | None = None,
        most: int = sys.maxsize,
    ) -> Sequence[tuple[int, dict[str, str], dict[str, int]]]:
        """Usage from `since` to before `until` in buckets of `width` seconds: their start, the values
        of `groups` and the counts, of the first `most` buckets that have any. `kept_bytes` is the most of an
        hour in the bucket, so `groups` must have the tenant where it is not given."""
        bucket = UsageRecord.hour - UsageRecord.hour % width
        within = _within(since, until, tenant)
        starts = select(bucket).where(*within).distinct().order_by(bucket).limit(most)
        last = max(session.scalars(starts), default=since)
        query = _query(bucket, groups).where(*within, bucket <= last)
        names, found = (*COUNTS, "kept_bytes"), session.execute(query).all()
        at = 1 + len(groups)
        return [
            (row[0], dict(zip(groups, row[1:at], strict=True)), dict(zip(names, row[at:], strict=True)))
            for row in found
        ]

    @writes
    def sweep(self, session: Session, before: float) -> bool:
        """Deletes some rows of hours before a time (Unix seconds); True where more may be left."""
        oldest = session.scalar(select(func.min(UsageRecord.hour)).where(UsageRecord.hour < before))
        if oldest is not None:
            session.execute(delete(UsageRecord).where(UsageRecord.hour == oldest))
        return oldest is not None

    def close(self) -> None:
        """Closes the journal; its lines are merged when it is opened again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _name(self) -> str:
        path = self._folder / "id"
        if not (name := path.read_text(encoding="utf-8").strip() if path.is_file() else ""):
            name = new_id("journal")
            write_whole(path, [name.encode()])
        return name

    def _segments(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.jsonl") if path.stem.isdigit())


def note_trained(session: Session, now: int, tenant: str, model: str, tokens: int) -> None:
    """Adds trained tokens of a job to the table, in the transaction that stores its step; negative for a
    step that is repeated."""
    _add(session, [((now // HOUR * HOUR, tenant, "", model, ""), Used(trained_tokens=tokens))])


def note_kept(session: Session, now: int) -> None:
    """Notes the bytes that are kept of each tenant, the most of each hour."""
    sums = select(TenantRows.tenant, func.sum(TenantRows.bytes)).where(TenantRows.tenant.is_not(None))
    for tenant, nbytes in session.execute(sums.group_by(TenantRows.tenant)).all():
        row = _row(session, (now // HOUR * HOUR, tenant, "", "", ""))
        row.kept_bytes = max(row.kept_bytes, int(nbytes))


def _merge(
    session: Session,
    journal: str,
    segment: int,
    sums: Iterable[tuple[tuple[int, str, str, str, str], Used]],
) -> None:
    """Adds a segment's sums, unless it was merged already."""
    if segment <= _merged(session, journal):
        return
    _add(session, sums)
    session.merge(MergedSegment(journal, segment))


def _merged(session: Session, journal: str) -> int:
    found = session.get(MergedSegment, journal)
    return 0 if found is None else found.segment


def _add(session: Session, sums: Iterable[tuple[tuple[int, str, str, str, str], Used]]) -> None:
    for names, used in sums:
        row = _row(session, names)
        for name in COUNTS:
            setattr(row, name, getattr(row, name) + getattr(used, name))


def _row(session: Session, names: tuple[int, str, str, str, str]) -> UsageRecord:
    """The row with these names, made if there is none."""
    if (row := session.get(UsageRecord, names)) is None:
        row = UsageRecord(*names, 0, 0, 0, 0, 0, 0)
        session.add(row)
    return row


def _sums(path: Path) -> list[tuple[tuple[int, str, str, str, str], Used]]:
    """The sums of a segment's lines. A line that is not whole, as after a power cut, is left out."""
    sums: dict[tuple[int, str, str, str, str], Counter[str]] = {}
    with suppress(FileNotFoundError), path.open("rb") as lines:  # merged by another process
        for line in lines:
            try:
                hour, tenant, key, model, version, *counts = json.loads(line)
                used = Used(*map(int, counts))
                names = int(hour), str(tenant), str(key), str(model), str(version)
            except (ValueError, TypeError, RecursionError):
                continue
            sums.setdefault(names, Counter()).update(used._asdict())
    return [(names, Used(**counts)) for names, counts in sums.items()]


def _within(since: int, until: int, tenant: str | None) -> list[ColumnElement[bool]]:
    wanted = [UsageRecord.hour >= since, UsageRecord.hour < until]
    return wanted if tenant is None else [*wanted, UsageRecord.tenant == tenant]


def _query(bucket: ColumnElement[int], groups: Sequence[str]) -> Select[Any]:
    columns = [getattr(UsageRecord, name) for name in groups]
    sums = [func.sum(getattr(UsageRecord, name)) for name in COUNTS]
    query = select(bucket, *columns, *sums, func.max(UsageRecord.kept_bytes))
    return query.group_by(bucket, *columns).order_by(bucket, *columns)
