"""The database: what is acknowledged stays, through kills, upgrades and repeated news."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

from coserve.core.job_status import FINAL, UNFINISHED, JobStatus
from coserve.errors import ConfigError, ConflictError, StateError
from coserve.memory.malloc import resident_bytes
from coserve.serve.store import sqlite
from coserve.serve.store.database import READERS, Database, reads, writes
from coserve.serve.store.records import Adapter, File, JobRecord, NewsMark, TableRow
from coserve.serve.store.sqlite import CACHE_KIB
from coserve.serve.store.store import Store
from coserve.wire.messages import JobCheckpoint, JobStarted, JobStep

WRITER = """
import asyncio, sys
from pathlib import Path
from coserve.serve.store.records import File
from coserve.serve.store.store import Store

async def main():
    store = Store(Path(sys.argv[1]))
    for i in range(10**6):
        id = f"file-{sys.argv[2]}-{i}"
        await store.files.add(File(id, "local", "a", "fine-tune", 1, 1, ".jsonl"))
        print(id, flush=True)

asyncio.run(main())
"""


IN_A_FILE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


def run(folder: Path, story: Callable[[Store], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        with Store(folder, clock=lambda: 1000.0) as store:
            await story(store)

    asyncio.run(whole())


def a_file(id: str, tenant: str = "local") -> File:
    return File(id, tenant, "a.jsonl", "fine-tune", 1, 1, ".jsonl", 5)


async def a_job(store: Store, id: str = "ftjob-1", **more: Any) -> JobRecord:
    fields: dict[str, Any] = {
        "id": id, "tenant": "local", "status": "running", "model": "tiny", "name": f"ft:{id}", "base": "tiny",
        "created": 1, "training_file": "file-1", "seed": 0, "every": 5,
        "hyperparameters": {}, "options": {}, **more,
    }  # fmt: skip
    if await store.files.get("local", "file-1") is None:
        await store.files.add(a_file("file-1"))
    job = JobRecord(**fields)
    await store.jobs.add(job, "created")
    assert await store.leases.claim("job", job.id)
    return job


def a_step(step: int, tokens: int = 10, loss: float = 1.0) -> JobStep:
    return JobStep("ftjob-1", step, loss, 5, tokens, 1.0, 1e-4, 2.0)


@IN_A_FILE
def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    known = []
    for start in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(20 + 7 * start):
                known.append(child.stdout.readline().strip())
            os.kill(child.pid, signal.SIGKILL)
            # What it had said before it died, a last line that was cut short aside.
            known += [line for line in child.stdout.read().split("\n")[:-1] if line]
    assert len(known) >= 81

    async def story(store: Store) -> None:
        page = await store.files.page("local", None, 10**6, ascending=True)
        assert page is not None
        there = [file.id for file in page.records]
        assert set(known) <= set(there) and len(there) <= len(known) + 3

    run(tmp_path, story)


@IN_A_FILE
def test_every_transaction_is_on_disk_when_it_ends(tmp_path: Path) -> None:
    async def story(store: Store) -> None:
        def settings(session: Session) -> list[Any]:
            names = ("journal_mode", "synchronous", "foreign_keys")
            return [session.scalar(text(f"PRAGMA {name}")) for name in names]

        assert await store._database.write(settings) == ["wal", 2, 1]  # FULL is 2

    run(tmp_path, story)


@IN_A_FILE
def test_reading_a_large_database_keeps_little_of_it_in_memory(tmp_path: Path) -> None:
    """Every connection has a cache of its own, which a server that has had a thousand jobs would fill."""
    rows = 16_000  # of a KiB

    async def story(store: Store) -> None:
        database, everybody = store._database, threading.Barrier(READERS)

        def fill(session: Session) -> None:
            connection = session.connection()
            connection.exec_driver_sql("CREATE TABLE large (value BLOB)")
            connection.exec_driver_sql("INSERT INTO large VALUES (?)", [(bytes(1024),)] * rows)

        def read(session: Session) -> int:
            session.connection()
            everybody.wait(10)  # a connection each
            return int(session.scalar(text("SELECT sum(length(value)) FROM large")))

        await database.write(fill)
        before = resident_bytes()
        read_by_all = await asyncio.gather(*(database.read(read) for _ in range(READERS)))
        assert read_by_all == [rows * 1024] * READERS
        assert resident_bytes() - before < READERS * CACHE_KIB * 1024 + 2 * 2**20

    run(tmp_path, story)


@IN_A_FILE
def test_the_migrations_make_what_the_tables_say(tmp_path: Path) -> None:
    Store(tmp_path).close()
    engine = create_engine(f"sqlite:///{tmp_path / 'coserve.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), TableRow.metadata) == []
    engine.dispose()


@IN_A_FILE
def test_a_database_of_a_newer_coserve_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "coserve.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(StateError, match=r"newer coserve .*9999"):
        Store(tmp_path)


@IN_A_FILE
def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "coserve.db").write_bytes(b"certainly not" * 100)
    with pytest.raises(StateError, match="cannot be used"):
        Store(tmp_path)
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StateError, match="cannot be used"):
        Store(tmp_path / "taken")


@IN_A_FILE
def test_a_migration_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coserve.serve.store.migrations import v0001_first

    real = v0001_first.upgrade.__globals__["op"].bulk_insert
    from alembic import op

    def broken(*_: object) -> None:
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr(op, "bulk_insert", broken)
    with pytest.raises(StateError, match="disk full: make room"):
        Store(tmp_path)
    with sqlite3.connect(tmp_path / "coserve.db") as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    connection.close()
    monkeypatch.setattr(op, "bulk_insert", real)
    Store(tmp_path).close()


def test_keys_are_kept_as_hashes(tmp_path: Path) -> None:
    async def story(store: Store) -> None:
        assert not await store.tenants.any_keys()
        key, secret = await store.tenants.create_key("ann", weight=2.0)
        other, second = await store.tenants.create_key("ann")
        assert secret.startswith("sk-coserve-") and len(secret) == len("sk-coserve-") + 43  # 256 bits
        assert key.prefix == secret[: len(key.prefix)] and len(key.prefix) < 20
        tenant = await store.tenants.of_key(secret)
        assert tenant is not None and (tenant.name, tenant.weight) == ("ann", 2.0)
        assert await store.tenants.of_key(second) == tenant
        for wrong in ("", secret[:-1], secret + "x", key.prefix, key.prefix + "x" * 37, "\ud800"):
            assert await store.tenants.of_key(wrong) is None
        assert await store.tenants.revoke_key(key.prefix) and not await store.tenants.revoke_key(key.id)
        assert await store.tenants.of_key(secret) is None and await store.tenants.of_key(second) == tenant
        assert [k.revoked for k in await store.tenants.keys()] == [1000, None]
        assert await store.tenants.any_keys() and await store.tenants.revoke_key(other.id)
        assert not await store.tenants.any_keys()
        for file in tmp_path.glob("coserve.db*"):
            assert secret.encode() not in file.read_bytes()
        for name, weight in (("a/b", None), ("", None), ("a", 0.0), ("a", float("nan"))):
            with pytest.raises(ConfigError):
                await store.tenants.create_key(name, weight)

    run(tmp_path, story)


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    async def story(store: Store) -> None:
        await store.files.add(a_file("file-1"))
        with pytest.raises(ConflictError, match="file-2"):
            await a_job(store, training_file="file-2")
        assert await store.jobs.get("local", "ftjob-1") is None
        await a_job(store)
        with pytest.raises(ConflictError, match="ftjob-1"):
            await store.files.remove("local", "file-1")
        assert await store.files.get("local", "file-1") is not None
        assert await store.files.remove("other", "file-1") is None

    run(tmp_path, story)


def test_news_counts_once_however_often_it_comes(tmp_path: Path) -> None:
    async def story(store: Store) -> None:
        await a_job(store)
        news = store.job_events
        for _ in range(2):
            started = JobStarted("ftjob-1", 0, 9, 5, 50, 0, 0, 1, 1, 1e-4, ignored=("id", "source"))
            await news.started(NewsMark("a", 1), started)
            await news.stepped(NewsMark("a", 2), a_step(1))
            await news.checkpointed(NewsMark("a", 3), JobCheckpoint("ftjob-1", 1, str(tmp_path / "c"), "d"))
        assert await news.seen(NewsMark("a", 3)) and not await news.seen(NewsMark("a", 4))
        await news.stepped(NewsMark("a", 4), a_step(2))
        # The next engine goes on from step 1: it tells of that checkpoint again, and repeats step 2.
        await news.forget_engines_before("b")
        assert not await news.seen(NewsMark("b", 1)) and not await news.seen(NewsMark("a", 4))
        await news.started(NewsMark("b", 1), msgspec.structs.replace(started, step=1))
        await news.checkpointed(NewsMark("b", 2), JobCheckpoint("ftjob-1", 1, str(tmp_path / "c"), "d"))
        await news.stepped(NewsMark("b", 3), a_step(2, tokens=12, loss=0.5))
        job = await store.jobs.get("local", "ftjob-1")
        assert job is not None and (job.trained_tokens, job.step, job.steps) == (22, 2, 9)
        assert [row["train_loss"] for row in await store.job_history.metrics("ftjob-1")] == [1.0, 0.5]
        assert len(await store.job_history.all_checkpoints("ftjob-1")) == 1
        page = await store.job_history.events("ftjob-1", None, 100)
        assert page is not None
        assert [event.message.split(":")[0] for event in page.records[::-1]] == [
            "created", "Fine-tuning job started",
            "Not read of the training file's records", "Step 1/9", "Checkpoint created at step 1", "Step 2/9",
            "Fine-tuning job resumed from step 1",
        ]  # fmt: skip

    run(tmp_path, story)


def test_news_of_a_job_that_is_over_changes_nothing(tmp_path: Path) -> None:
    async def story(store: Store) -> None:
        job = await a_job(store)
        await store.jobs.move(job.id, (JobStatus.RUNNING,), JobStatus.CANCELLED)
        await store.job_events.stepped(NewsMark("a", 1), a_step(1))
        await store.job_events.failed(NewsMark("a", 2), job.id, {"message": "x"})
        await store.job_events.stepped(NewsMark("a", 3), JobStep("ftjob-none", 1, 1.0, 1, 1, 1.0, 1.0, 1.0))
        after = await store.jobs.get("local", job.id)
        assert after is not None and (after.status, after.step, after.error) == ("cancelled", 0, None)
        assert await store.job_events.seen(NewsMark("a", 3))

    run(tmp_path, story)


def test_adapters_are_found_by_their_owners_and_the_folder_may_move(tmp_path: Path) -> None:
    old, new, outside = tmp_path / "old", tmp_path / "new", tmp_path / "outside"

    async def story(store: Store) -> None:
        _, secret = await store.tenants.create_key("ann")
        ann = await store.tenants.of_key(secret)
        assert ann is not None
        path = store.path_of(store.adapter_folder("adapter-1"))
        own = Adapter("adapter-1", "mine", path, "tiny", 1, ann.id)
        assert await store.adapters.add(own)
        assert not await store.adapters.add(Adapter("adapter-2", "mine", outside, "tiny", 1, ann.id))
        await store.adapters.share([Adapter("adapter-3", "ours", outside, "tiny", 1)])
        await store.adapters.share([Adapter("adapter-3", "ours", outside, "tiny", 1)])
        assert await store.adapters.find(ann.id, "mine", "tiny") == own
        assert await store.adapters.find(ann.id, "mine", "large") is None
        assert await store.adapters.find("local", "mine", "tiny") is None
        assert [a.name for a in await store.adapters.list("local", "tiny")] == ["ours"]
        assert not await store.adapters.list("local", "large")
        assert await store.adapters.remove("local", "mine") is None
        assert await store.adapters.remove("local", "ours") is None

    async def moved(store: Store) -> None:
        for id, path in (("adapter-1", new / "adapters" / "adapter-1"), ("adapter-3", outside)):
            found = await store.adapters.get(id)
            assert found is not None and store.folder_of(found) == path

    run(old, story)
    old.rename(new)
    run(new, moved)


def test_an_adapter_stays_while_a_job_begins_with_it(tmp_path: Path) -> None:
    async def story(store: Store) -> None:
        await store.adapters.add(Adapter("adapter-1", "mine", tmp_path, "tiny", 1, "local"))
        job = await a_job(store, start_from="adapter-1")
        with pytest.raises(ConflictError, match="ftjob-1"):
            await store.adapters.remove("local", "mine")
        await store.jobs.move(job.id, (JobStatus.RUNNING,), JobStatus.CANCELLED)
        assert await store.adapters.remove("local", "mine") is not None

    run(tmp_path, story)


@IN_A_FILE
def test_a_file_that_another_process_holds_is_a_deliberate_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.01)

    async def story(store: Store) -> None:
        other = sqlite3.connect(tmp_path / "coserve.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StateError, match="cannot be used now: database is locked"):
            await store.files.add(a_file("file-1"))
        assert await store.files.get("local", "file-1") is None  # reading never waits
        other.execute("ROLLBACK")
        other.close()
        await store.files.add(a_file("file-1"))

    run(tmp_path, story)


@IN_A_FILE
def test_unfinished_jobs_are_found_without_a_look_at_all_others(tmp_path: Path) -> None:
    """A server asks for them several times a job, and jobs are never deleted."""
    asked: list[tuple[str, Any]] = []

    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if "FROM jobs" in statement:
            asked.append((statement, parameters))

    async def story(store: Store) -> None:
        states = (*UNFINISHED, *FINAL)
        for number in range(60):
            await a_job(store, f"ftjob-{number}", status=states[number % len(states)])
        event.listen(Engine, "before_cursor_execute", note)
        try:
            found = await store.jobs.unfinished()
        finally:
            event.remove(Engine, "before_cursor_execute", note)
        assert [job.id for job in found] == [
            f"ftjob-{n}" for n in range(60) if n % len(states) < len(UNFINISHED)
        ]

    run(tmp_path, story)
    (file,) = tmp_path.glob("*.db")
    connection = sqlite3.connect(file)
    (found,) = asked
    steps = [str(row[-1]) for row in connection.execute(f"EXPLAIN QUERY PLAN {found[0]}", found[1])]
    connection.close()
    assert any(step.startswith("SEARCH jobs USING INDEX") for step in steps), steps
    assert not any(step.startswith("SCAN") for step in steps), steps


def test_a_filtered_page_goes_on_after_a_row_that_the_filter_leaves_out(tmp_path: Path) -> None:
    """As one does that was the last of a page, and has changed since; another tenant's is none."""

    async def story(store: Store) -> None:
        for number, purpose in enumerate(("batch", "fine-tune", "batch", "evals")):
            await store.files.add(File(f"file-{number}", "local", "a", purpose, 1, 1, ".jsonl"))
        page = await store.files.page("local", "file-1", 10, True, "batch")
        assert page is not None and [file.id for file in page.records] == ["file-2"]
        assert await store.files.page("other", "file-1", 10, True, "batch") is None

    run(tmp_path, story)


def test_a_stores_methods_run_where_its_database_has_them_run(tmp_path: Path) -> None:
    """Methods that write run on the one thread that does, in their callers' context; others run beside it."""
    actor = ContextVar("actor", default="nobody")

    class Rows:
        def __init__(self, database: Database) -> None:
            self._database = database

        @reads
        def read(self, session: Session, more: int) -> tuple[str, int]:
            return threading.current_thread().name, int(session.scalar(text("SELECT 1"))) + more

        @writes
        def write(self, session: Session, /, more: int) -> tuple[str, str, int]:
            return threading.current_thread().name, actor.get(), int(session.scalar(text("SELECT 1"))) + more

    async def story(store: Store) -> None:
        rows = Rows(store._database)
        actor.set("ann")
        thread, number = await rows.read(more=1)
        assert thread.startswith("store-read") and number == 2
        thread, who, number = await rows.write(2)
        assert thread.startswith("store-write") and (who, number) == ("ann", 3)

    run(tmp_path, story)
