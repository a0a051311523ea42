"""Clocks of servers that jump, while the database's does not."""

import asyncio
import time
from pathlib import Path

import pytest

from coserve.serve.store.records import File
from coserve.serve.store.store import Store


@pytest.mark.postgres
def test_no_server_s_own_clock_decides(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not database:
        pytest.skip("a file's server is alone: its clock is the database's")
    real = time.time
    a, b = Store(tmp_path / "a", owner="a"), Store(tmp_path / "b", owner="b")

    async def story() -> None:
        now = real()
        file = File("file-1", "local", "x", "fine-tune", 1, int(now), ".jsonl", expires=int(now) + 3600)
        await a.files.add(file)
        assert await a.leases.claim("job", "x")
        for jump in (10 * 86_400.0, -10 * 86_400.0):
            monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
            b.leases._steady -= 100.0
            assert not await b.leases.claim("job", "x") and await b.leases.of_others("job") == {"x"}
            assert await a.leases.renew() == set() and await b.leases.renew() == set()
            for store in (a, b):
                assert abs(store.clock() - real()) < 600.0
                assert not await store.expire_files() and not await store.files.expired()
                assert await store.files.get("local", "file-1") is not None
            assert not await b.retention.sweep(b.clock() - 86_400.0)

    asyncio.run(story())
    monkeypatch.setattr(time, "time", real)
    a.close(), b.close()
