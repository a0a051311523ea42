"""Writes of a server that has lost its leases: none of them changes anything."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import update

from coserve.errors import LeaseLost
from coserve.serve.store.batches import UNENDED
from coserve.serve.store.leases import LEASE_SECONDS
from coserve.serve.store.records import (
    BatchRecord,
    EvalItemRecord,
    EvalRecord,
    EvalRunRecord,
    File,
    LeaseRecord,
    ResponseRecord,
    TinkerCheckpoint,
    TinkerRun,
    TinkerSession,
)
from coserve.serve.store.store import Store

OWN = "local"
KINDS = {"batch": "batch-1", "eval": "run-1", "response": "resp-1", "tinker": "s:train:0"}


async def filled(store: Store) -> None:
    """Work of each kind."""
    await store.batches.add(BatchRecord("batch-1", OWN, "in_progress", "/v1/completions", "file-1", 1, 60))
    await store.evals.add(EvalRecord("eval-1", OWN, "e", 1, {}, []))
    tally = {"counts": {}, "criteria": {}, "models": {}}
    await store.evals.add_run(EvalRunRecord("run-1", OWN, "eval-1", "r", 1, "in_progress", {}, tally))
    await store.responses.add(ResponseRecord("resp-1", OWN, 1, "in_progress", "{}", request="{}"), [])
    await store.tinker_sessions.add(TinkerSession("s", OWN, 1))
    await store.tinker_sessions.add(TinkerRun("s:train:0", OWN, "s", "tiny", {}, 1, 1))


def writes(store: Store, name: str) -> dict[str, Callable[[], Awaitable[object]]]:
    """Each write of an owner, with contents of its own."""
    file = File(f"file-{name}", OWN, "out", "batch_output", 1, 1, ".jsonl")
    item = EvalItemRecord(f"item-{name}", OWN, "run-1", 0, 1, "pass", {}, [])
    ended = ResponseRecord("resp-1", OWN, 1, "completed", f'{{"by": "{name}"}}')
    (folder := store.tinker_folder(name)).mkdir()
    saved = TinkerCheckpoint(name, OWN, "s:train:0", "weights", "x", store.path_of(folder), "tiny", {}, 0, 1)
    return {
        "a batch's result": lambda: store.batches.advance(
            "batch-1", UNENDED, [file], status="completed", output_file=file.id
        ),
        "an eval's outcome": lambda: store.evals.add_item(item, {}),
        "an eval's end": lambda: store.evals.advance("run-1", "completed"),
        "a response": lambda: store.responses.end(ended, []),
        "a saved state": lambda: store.tinker_checkpoints.add(saved),
    }


def test_a_server_writes_nothing_once_another_one_has_its_lease(tmp_path: Path, database: str) -> None:
    a = Store(tmp_path / "a", owner="a")
    if not database:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "coserve.db").symlink_to(tmp_path / "a" / "coserve.db")
    b = Store(tmp_path / "b", owner="b")

    async def story() -> None:
        await filled(a)
        for kind, subject in KINDS.items():
            assert await a.leases.claim(kind, subject)
        b.leases._steady -= 2 * LEASE_SECONDS
        late = update(LeaseRecord).values(expires=0.0)
        await a._database.write(lambda session: session.execute(late))  # as it hangs
        for kind, subject in KINDS.items():
            assert await b.leases.claim(kind, subject)
        for what, write in writes(a, "a").items():
            with pytest.raises(LeaseLost, match="another server has taken over"):
                await write()
                pytest.fail(what)
        batch, response = await b.batches.get(OWN, "batch-1"), await b.responses.get(OWN, "resp-1")
        assert batch is not None and (batch.status, batch.output_file) == ("in_progress", None)
        assert response is not None and response.status == "in_progress"
        assert await b.evals.places("run-1") == set() and await b.files.get(OWN, "file-a") is None
        for what, write in writes(b, "b").items():
            assert await write() in (True, None, "completed") or what == "a batch's result"
        batch, response = await a.batches.get(OWN, "batch-1"), await a.responses.get(OWN, "resp-1")
        assert batch is not None and (batch.status, batch.output_file) == ("completed", "file-b")
        assert response is not None and response.body == '{"by": "b"}'
        assert await a.files.get(OWN, "file-b") is not None and await a.evals.places("run-1") == {0}
        (saved,), _ = await a.tinker_checkpoints.page(OWN, 0.0)
        assert saved.id == "b"

    asyncio.run(story())
    a.close(), b.close()


def test_a_lease_is_left_where_its_owner_died_and_not_where_it_gave_it_back(
    tmp_path: Path, database: str
) -> None:
    a = Store(tmp_path, owner="a")

    async def story() -> None:
        for subject in ("given", "held", "earlier"):
            assert await a.leases.claim("tinker", subject)
        await a.leases.release("tinker", "given")
        assert not await a.leases.claim_left("tinker", "held"), "it is this server's"
        assert not await a.leases.claim_left("tinker", "given")
        assert not await a.leases.claim_left("tinker", "never")
        del a.leases._held["tinker", "earlier"]  # as after a restart
        assert await a.leases.claim_left("tinker", "earlier") and a.leases.fence("tinker", "earlier") == 2

    asyncio.run(story())
    a.close()
