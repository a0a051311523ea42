"""Tests of PostgreSQL's transactions, as servers that share a database need them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from coserve.errors import QuotaExceeded
from coserve.serve.store.migrate import head_revision
from coserve.serve.store.opening import open_database
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import File
from coserve.serve.store.store import Store

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.parametrize("database", ["postgres"], indirect=True),
]
_AGAIN = text("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")


def file(id: str, tenant: str, size: int = 1) -> File:
    return File(id, tenant, f"{id}.jsonl", "fine-tune", size, 1, ".jsonl")


async def tenant_of(store: Store) -> str:
    await store.tenants.create_key("ann")
    return next(one.id for one in await store.tenants.list() if one.name == "ann")


def test_a_transaction_that_is_repeated_adds_its_rows(tmp_path: Path) -> None:
    """Also where a query fails after a row was flushed: a row must not count as stored then."""

    async def story(store: Store) -> None:
        added, tries = file("file-0", await tenant_of(store)), 0

        def write(session: Session) -> None:
            nonlocal tries
            tries += 1
            session.add(added)
            session.flush()
            if tries < 3:
                session.execute(_AGAIN)

        await store._database.write(write)
        assert tries == 3 and await store.files.get(added.tenant, "file-0") is not None

    with Store(tmp_path) as store:
        asyncio.run(story(store))


def test_servers_that_start_at_once_migrate_once(database: str, tmp_path: Path) -> None:
    everybody = threading.Barrier(3)

    def start(_: int) -> str:
        everybody.wait(30)
        opened = open_database(tmp_path, database)
        try:
            versions = asyncio.run(
                opened.read(lambda session: list(session.scalars(text("SELECT * FROM alembic_version"))))
            )
        finally:
            opened.close()
        assert len(versions) == 1
        return str(versions[0])

    with ThreadPoolExecutor(3) as threads:
        assert set(threads.map(start, range(3))) == {head_revision()}


def test_servers_do_not_exceed_a_quota_together(tmp_path: Path) -> None:
    most, servers, each = 7, 3, 6

    async def add_all(store: Store, tenant: str, number: int) -> int:
        added = 0
        for n in range(each):
            try:
                await store.files.add(file(f"file-{number}-{n}", tenant))
                added += 1
            except QuotaExceeded:
                pass
        return added

    async def story(stores: list[Store]) -> None:
        tenant = await tenant_of(stores[0])
        adding = (add_all(store, tenant, number) for number, store in enumerate(stores))
        assert sum(await asyncio.gather(*adding)) == most
        page = await stores[0].files.page(tenant, None, 100, True)
        assert page is not None and len(page.records) == most

    stores = [Store(tmp_path / str(number), quotas=Quotas(files=most)) for number in range(servers)]
    try:
        asyncio.run(story(stores))
    finally:
        for store in stores:
            store.close()
