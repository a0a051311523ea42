"""Rows and bytes that the database counts of each tenant, against a count of all that is there."""

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Boolean, Float, Integer, LargeBinary, select, text

from coserve.core.job_status import JobStatus
from coserve.errors import QuotaExceeded
from coserve.serve.store.migrations import (
    v0006_kept,
    v0007_creations,
    v0010_details,
    v0011_responses,
    v0012_batches,
    v0013_openai,
    v0024_run_log_owners,
)
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import (
    BatchRecord,
    ConversationRecord,
    Creation,
    Event,
    File,
    ItemRecord,
    JobRecord,
    QuarantineRecord,
    ResponseRecord,
    StoredChat,
    TableRow,
    TenantRows,
    TinkerCheckpoint,
    TinkerRequest,
    TinkerRun,
    TinkerSampler,
    TinkerSession,
    TinkerState,
    UploadRecord,
)
from coserve.serve.store.store import Store

# Made by operators and the server alone.
NOT_A_TENANTS = {
    *("tenants", "keys", "logins", "news", "suspects", "kept", "usage", "usage_merged", "audit", "leases"),
}
DAY = 86400
NUMBERS = Integer | Float | Boolean | LargeBinary  # columns without a text; of bytes there is the number


def play(folder: Path, story: Callable[[Store], Coroutine[Any, Any, None]], **quotas: int) -> None:
    with Store(folder, quotas=Quotas(**quotas)) as store:
        asyncio.run(story(store))


async def tenants(store: Store) -> list[str]:
    for name in ("ann", "bob"):
        await store.tenants.create_key(name)
    return [one.id for one in await store.tenants.list() if one.name in ("ann", "bob")]


async def counted(store: Store) -> dict[tuple[str, str], tuple[int, int]]:
    rows = await store._database.read(lambda session: list(session.scalars(select(TenantRows))))
    return {(row.tenant, row.kind): (row.rows, row.bytes) for row in rows if row.rows or row.bytes}


def written(value: Any) -> str:
    """A text as it is stored; PostgreSQL's driver reads JSON by itself."""
    return value if isinstance(value, str) else json.dumps(value)


async def recounted(store: Store) -> dict[tuple[str, str], tuple[int, int]]:
    """The same, from all rows in Python."""

    def read(session: Any) -> dict[tuple[str, str], tuple[int, int]]:
        owners = dict(session.execute(text("SELECT id, tenant FROM jobs")).all())
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for name, table in TableRow.metadata.tables.items():
            for row in session.execute(text(f"SELECT * FROM {name}")).mappings():
                owner = row["tenant"] if "tenant" in row else owners.get(row.get("job"))
                if name in NOT_A_TENANTS or owner is None:
                    continue
                texts = [row[one.name] for one in table.columns if not isinstance(one.type, NUMBERS)]
                size = sum(len(written(one).encode()) for one in texts if one is not None)
                size += 200 + row.get("bytes", 0)
                rows, nbytes = found.get((owner, name), (0, 0))
                found[owner, name] = rows + 1, nbytes + size
        return found

    return await store._database.read(read)


def job(tenant: str, name: str, **fields: Any) -> JobRecord:
    return JobRecord(name, tenant, JobStatus.QUEUED, "m", name, "b", 1, "file-0", 1, 1, {}, {}, **fields)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_every_table_that_a_tenant_adds_to_is_counted_with_all_its_texts(tmp_path: Path) -> None:
    """A table or column that is added later needs triggers that know it."""
    counting = v0006_kept.TABLES | v0007_creations.TABLES | v0010_details.TABLES | v0011_responses.TABLES
    counting |= v0012_batches.TABLES | v0013_openai.TABLES | v0024_run_log_owners.TABLES
    assert counting.keys() == TableRow.metadata.tables.keys() - NOT_A_TENANTS
    for name, (_, columns, has_files) in counting.items():
        table = TableRow.metadata.tables[name]
        texts = {one.name for one in table.columns if not isinstance(one.type, NUMBERS)}
        assert set(columns.split()) == texts, name
        assert has_files is ("bytes" in table.columns), name

    async def story(store: Store) -> None:
        triggers = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        found = await store._database.read(lambda session: set(session.scalars(text(triggers))))
        assert found == {
            f"kept_{name}_{when}" for name in counting for when in ("insert", "update", "delete")
        } | {"audit_is_append_only"}

    play(tmp_path, story)


def drawn(draw: random.Random, id: str, owner: str, made: list[TableRow]) -> TableRow:
    """A row of some kind, which belongs to earlier ones."""
    words, sessions = "é" * draw.randrange(50), [one for one in made if isinstance(one, TinkerSession)]
    jobs = [one for one in made if isinstance(one, JobRecord)]
    rows: list[TableRow] = [
        Creation(id, owner, 1, words, words, reply=words),
        BatchRecord(id, owner, words, words, words, 1, 1, labels={words: words}, errors={words: words}),
        UploadRecord(id, owner, "pending", words, words, 5, draw.randrange(10**6), 1, 1, file=words),
        TinkerSession(id, owner, 1, words, {"a": words}),
        File(id, owner, words, "fine-tune", draw.randrange(10**6), 1, ".jsonl", details=words),
        job(owner, id, labels={"x": words}),
        QuarantineRecord(id, "job", id, words, 1, draw.choice([None, owner])),
        ResponseRecord(id, owner, 1, "completed", words, previous=words),
        ItemRecord(id, owner, words, None, words, True),
        ConversationRecord(id, owner, 1, {"x": words}),
        StoredChat(id, owner, 1, words, words, words, {"x": words}),
        TinkerRequest(id, 1, 0, words, "", words.encode(), owner, len(words.encode()), {"x": words}),
        TinkerState(id, 1, Path(words), True, owner, draw.randrange(10**6)),
    ]
    if sessions:
        session = draw.choice(sessions).id
        rows.append(TinkerRun(id, owner, session, "b", {"rank": 1}, 1, 1))
        rows.append(TinkerSampler(id, owner, session, words, 1))
    if jobs:
        rows.append(Event(id, draw.choice(jobs).id, 1, "info", words, data={"step": words}))
    return draw.choice(rows)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_counted_is_what_is_there(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)

    async def story(store: Store) -> None:
        owners = await tenants(store)
        made: list[TableRow] = []
        for number in range(60):
            row = drawn(draw, str(number), draw.choice(owners), made)
            made.append(row)
            await store._database.write(lambda session, row=row: session.add(row))
            if draw.random() < 0.3:
                other = draw.choice([one for one in made if isinstance(one, TinkerSession | File)] or [None])
                if isinstance(other, TinkerSession):
                    await store.tinker_sessions.change(TinkerSession, other.id, project="p" * number)
                elif isinstance(other, File):
                    await store.files.remove(other.tenant, other.id)
            assert await counted(store) == await recounted(store)

    play(tmp_path, story)


def test_sessions_samplers_and_jobs_count_towards_the_quota(tmp_path: Path) -> None:
    async def story(store: Store) -> None:
        ann, bob = await tenants(store)
        kept = 0
        with pytest.raises(QuotaExceeded, match=r"may have 20000: delete some"):
            for number in range(100):
                metadata = {"notes": "x" * 3000}
                assert await store.tinker_sessions.add(TinkerSession(f"s{number}", ann, 1, None, metadata))
                kept += 1
        assert kept == 6
        with pytest.raises(QuotaExceeded):
            await store.tinker_sessions.add(TinkerRun("r", ann, "s0", "b", {"x": "y" * 3000}, 1, 1))
        with pytest.raises(QuotaExceeded):
            await store.files.add(File("f", ann, "n", "fine-tune", 3000, 1, ".jsonl"))
        assert await store.tinker_sessions.add(TinkerSession("of-bob", bob, 1, None, {"notes": "x" * 3000}))
        assert await counted(store) == await recounted(store), "what was refused left nothing"

    play(tmp_path, story, bytes=20_000)


def test_rows_without_bytes_count_too(tmp_path: Path) -> None:
    async def story(store: Store) -> None:
        ann, _ = await tenants(store)
        for number in range(10):
            await store.tinker_sessions.add(TinkerSession(f"s{number}", ann, 1))
        with pytest.raises(QuotaExceeded, match=r"11 records of you .* may keep 10"):
            await store.tinker_sessions.add(TinkerSampler("p", ann, "s0", "m", 1))

    play(tmp_path, story, rows=10)


def test_what_is_over_ends_by_age_a_bounded_number_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coserve.serve.store.retention.MOST", 5)

    async def story(store: Store) -> None:
        ann, _ = await tenants(store)
        old, new = 10 * DAY, 100 * DAY

        def fill(session: Any) -> None:
            session.add(File("file-0", ann, "n", "fine-tune", 1, 1, ".jsonl"))
            for name, status, finished in (
                ("done", JobStatus.CANCELLED, old), ("young", JobStatus.CANCELLED, new),
                ("runs", JobStatus.RUNNING, None),
            ):  # fmt: skip
                one = job(ann, name)
                one.status, one.finished = status, finished
                session.add(one)
                session.flush()
                session.add_all(Event(f"{name}-{n}", name, old, "info", "x") for n in range(12))
            for name, used in (("idle", old), ("used", new), ("saved", old)):
                session.add(TinkerSession(name, ann, old))
                session.flush()
                session.add(TinkerRun(f"{name}:r", ann, name, "b", {}, old, used))
                session.add(TinkerSampler(f"{name}:p", ann, name, "m", old))
            session.flush()
            path = Path("tinker/x")
            session.add(TinkerCheckpoint("c", ann, "saved:r", "weights", "x", path, "b", {}, 7, old))
            session.add(QuarantineRecord("q", "job", "z", "crashed", old, ann))

        await store._database.write(fill)
        store.job_folder("done").mkdir()
        turns = 1
        while await store.retention.sweep(50 * DAY):
            turns += 1
            assert turns < 50
        assert turns > 2, "twelve events take some turns"
        counts = {kind: rows for (_, kind), (rows, _) in (await counted(store)).items()}
        assert counts == {
            "files": 1, "jobs": 2, "events": 24, "tinker_sessions": 2, "tinker_runs": 2, "tinker_samplers": 1,
            "tinker_checkpoints": 1,
        }  # fmt: skip
        assert not store.job_folder("done").exists()
        assert await counted(store) == await recounted(store)

    play(tmp_path, story)
