"""Training runs are kept for other servers, and only the owner of a run's lease changes what is kept."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from coserve.errors import LeaseLost, QuotaExceeded
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import TinkerRequest, TinkerSession
from coserve.serve.store.run_log import PART, LoggedRequest, RunLog
from coserve.serve.store.store import Store
from coserve.serve.store.tinker import LEASED


def state(store: Store, name: str) -> Path:
    folder = store.tinker_folder(name)
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def request(number: int, kind: str, data: bytes, encoding: str = "") -> LoggedRequest:
    return LoggedRequest(number, kind, encoding, data, None)


def test_a_run_begins_with_its_oldest_state_and_has_all_requests_since(tmp_path: Path) -> None:
    large = bytes(range(256)) * (2 * PART // 256) + b"the end"

    async def story(store: Store) -> None:
        log: RunLog = store.run_log
        with pytest.raises(LeaseLost):
            await log.add("ann", "run", request(0, "CreateModel", b"{}"))
        assert await store.leases.claim(LEASED, "run") and await store.leases.claim(LEASED, "other")
        await log.add("ann", "run", request(1, "OptimStep", b"{}"))
        assert await log.read("run") is None, "how it was made is not known"
        await log.add("ann", "run", request(0, "CreateModel", b"made"))
        await log.add("ann", "run", request(2, "ForwardBackward", large, "zstd"))
        await log.add("ann", "run", request(2, "ForwardBackward", b"sent again"))
        await log.add("ann", "other", request(0, "CreateModel", b"other"))
        await log.finish("run", 1, {"type": "done"})
        found = await log.read("run")
        assert found is not None and (found.first.data, list(found.states)) == (b"made", [])
        assert [(one.number, one.encoding, one.data) for one in found.requests] == [
            (1, "", b"{}"), (2, "zstd", large),
        ]  # fmt: skip
        assert [one.outcome for one in found.requests] == [{"type": "done"}, None]

        for number in (1, 2):
            await log.keep("ann", "run", number, state(store, f"state-{number}"), True)
        assert {"tinker/state-1", "tinker/state-2"} == (await store.named_artifacts())["tinker"]
        await log.trim("run", 2)
        found = await log.read("run")
        assert found is not None and not found.requests and found.first.data == b"made"
        assert [(one.number, one.path.name) for one in found.states] == [(2, "state-2")]
        assert [one.name for one in (store.folder / "tinker").iterdir()] == ["state-2"]
        await store.tinker_checkpoints.sweep(store.folder / "tinker")
        assert (store.folder / "tinker" / "state-2").exists(), "a start keeps what runs go on from"
        await log.drop("run")
        assert await log.read("run") is None and await log.read("other") is not None
        assert not list((store.folder / "tinker").iterdir())

    with Store(tmp_path / "a", owner="a") as store:
        asyncio.run(story(store))


def test_an_owner_without_the_lease_changes_nothing(tmp_path: Path) -> None:
    async def story(a: Store, b: Store) -> None:
        assert await a.leases.claim(LEASED, "run")
        await a.run_log.add("ann", "run", request(0, "CreateModel", b"{}"))
        await a.run_log.add("ann", "run", request(1, "OptimStep", b"{}"))
        b.leases.owner = "a"  # as the same server after a restart: its fencing number is another one
        assert await b.leases.claim_left(LEASED, "run")
        for write in (
            a.run_log.add("ann", "run", request(2, "OptimStep", b"late")),
            a.run_log.finish("run", 1, {}),
            a.run_log.keep("ann", "run", 1, state(a, "late"), True),
            a.run_log.trim("run", 1),
            a.run_log.drop("run"),
        ):
            with pytest.raises(LeaseLost):
                await write
        found = await b.run_log.read("run")
        assert found is not None and not found.states
        assert [(one.number, one.outcome) for one in found.requests] == [(1, None)]

    with Store(tmp_path / "a", owner="a") as a, Store(tmp_path / "a", owner="b") as b:
        asyncio.run(story(a, b))


def test_what_is_kept_of_a_run_goes_with_its_age(tmp_path: Path) -> None:
    async def story(store: Store) -> None:
        assert await store.leases.claim(LEASED, "run")
        await store.run_log.add("ann", "run", request(0, "CreateModel", b"{}"))
        await store.run_log.keep("ann", "run", 0, folder := state(store, "state"), False)
        now = store.clock()
        await store.retention.sweep(now - 1000.0)
        assert await store.run_log.read("run") is not None, "its server has renewed the lease since then"
        await store.retention.sweep(now + 1000.0)
        assert await store.run_log.read("run") is None and not folder.exists()

    with Store(tmp_path / "a", owner="a") as store:
        asyncio.run(story(store))


def test_what_is_kept_of_runs_counts_towards_their_tenants_quota(tmp_path: Path) -> None:
    large = bytes(2 * PART + 100)

    async def story(store: Store) -> None:
        log: RunLog = store.run_log
        for run in ("run", "other"):
            assert await store.leases.claim(LEASED, run)
        await log.add("ann", "run", request(0, "CreateModel", b"made"))
        await log.add("ann", "run", request(1, "ForwardBackward", large))
        with pytest.raises(QuotaExceeded, match=r"may have 900000: delete some"):
            await log.add("ann", "run", request(2, "ForwardBackward", large))
        await log.add("ann", "run", request(1, "ForwardBackward", large))  # sent again: it is kept
        await log.add("ann", "run", request(3, "Refused", b""))  # its turn is over, here and elsewhere
        await log.add("bob", "other", request(1, "ForwardBackward", large))
        (folder := state(store, "large")).joinpath("weights").write_bytes(large)
        with pytest.raises(QuotaExceeded):
            await log.keep("ann", "run", 1, folder, True)
        found = await log.read("run")
        assert found is not None and not found.states
        assert [(one.number, len(one.data)) for one in found.requests] == [(1, len(large)), (3, 0)]

        await log.trim("run", 1)
        await log.add("ann", "run", request(2, "ForwardBackward", large))
        await log.drop("run")
        await log.keep("ann", "run", 2, folder, True)
        kept = {(one.kind, one.rows) for one in await store.tenants.kept("ann") if one.rows}
        assert kept == {("tinker_states", 1)}
        await log.drop("run")
        assert not await store.tenants.kept("ann")

    with Store(tmp_path / "a", quotas=Quotas(bytes=900_000), owner="a") as store:
        asyncio.run(story(store))


def test_what_has_no_room_in_the_end_is_not_kept_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are written one at a time, and others of the tenant may take the room in between."""

    async def story(store: Store) -> None:
        log: RunLog = store.run_log
        assert await store.leases.claim(LEASED, "run")
        checks = iter((None, QuotaExceeded("no room")))

        def check(*_: object) -> None:
            if (refusal := next(checks)) is not None:
                raise refusal

        monkeypatch.setattr(Quotas, "check_kept", check)
        with pytest.raises(QuotaExceeded, match="no room"):
            await log.add("ann", "run", request(1, "ForwardBackward", bytes(2 * PART)))
        assert not await store.tenants.kept("ann")

    with Store(tmp_path / "a", owner="a") as store:
        asyncio.run(story(store))


def test_logs_that_an_older_version_kept_are_counted(tmp_path: Path, database: str) -> None:
    """Tables of shape 0023 had neither tenants nor bytes."""

    async def older(store: Store) -> str:
        await store.tenants.create_key("ann")
        (ann,) = [one.id for one in await store.tenants.list() if one.name == "ann"]

        def write(session: Session) -> None:
            session.add(TinkerSession("s", ann, 1))
            for table in ("tinker_requests", "tinker_states"):
                if database:
                    session.execute(text(f"DROP FUNCTION kept_{table} CASCADE"))
                for when in () if database else ("insert", "update", "delete"):
                    session.execute(text(f"DROP TRIGGER kept_{table}_{when}"))
                for column in ("tenant", "bytes"):
                    session.execute(text(f"ALTER TABLE {table} DROP COLUMN {column}"))
            insert = "INSERT INTO tinker_requests (run, number, part, kind, encoding, data) "
            for run in ("s:train:0", "gone:train:0"):
                values = {"run": run, "data": bytes(700)}
                session.execute(text(f"{insert} VALUES (:run, 1, 0, 'Forward', '', :data)"), values)
            states = "INSERT INTO tinker_states (run, number, path, optimizer) "
            session.execute(text(f"{states} VALUES ('s:train:0', 1, 'tinker/x', true)"))
            session.execute(text("UPDATE alembic_version SET version_num = '0023'"))

        await store._database.write(write)
        return ann

    async def newer(store: Store, ann: str) -> None:
        kept = {one.kind: (one.rows, one.bytes) for one in await store.tenants.kept(ann)}
        own = sum(map(len, ("s:train:0", ann, "Forward"))) + 200 + 700
        assert kept["tinker_requests"] == (1, own)
        assert kept["tinker_states"][0] == 1
        runs = await store._database.read(lambda session: session.scalars(select(TinkerRequest.run)).all())
        assert runs == ["s:train:0"], "nobody goes on with a run without its session"

    with Store(tmp_path / "a", owner="a") as store:
        ann = asyncio.run(older(store))
    with Store(tmp_path / "a", owner="a") as store:
        asyncio.run(newer(store, ann))
