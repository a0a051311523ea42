"""Training runs are kept for other servers, and only the owner of a run's lease changes what is kept."""

import asyncio
from pathlib import Path

import pytest

from coserve.errors import LeaseLost
from coserve.serve.store.run_log import PART, RunLog
from coserve.serve.store.store import Store
from coserve.serve.store.tinker import LEASED


def state(store: Store, name: str) -> Path:
    folder = store.tinker_folder(name)
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_a_run_begins_with_its_oldest_state_and_has_all_requests_since(tmp_path: Path) -> None:
    large = bytes(range(256)) * (2 * PART // 256) + b"the end"

    async def story(store: Store) -> None:
        log: RunLog = store.run_log
        with pytest.raises(LeaseLost):
            await log.add("run", 0, "CreateModel", b"{}")
        assert await store.leases.claim(LEASED, "run") and await store.leases.claim(LEASED, "other")
        await log.add("run", 1, "OptimStep", b"{}")
        assert await log.read("run") is None, "how it was made is not known"
        await log.add("run", 0, "CreateModel", b"made")
        await log.add("run", 2, "ForwardBackward", large, "zstd")
        await log.add("run", 2, "ForwardBackward", b"sent again")
        await log.add("other", 0, "CreateModel", b"other")
        await log.finish("run", 1, {"type": "done"})
        found = await log.read("run")
        assert found is not None and (found.first.data, list(found.states)) == (b"made", [])
        assert [(one.number, one.encoding, one.data) for one in found.requests] == [
            (1, "", b"{}"), (2, "zstd", large),
        ]  # fmt: skip
        assert [one.outcome for one in found.requests] == [{"type": "done"}, None]

        for number in (1, 2):
            await log.keep("run", number, state(store, f"state-{number}"), True)
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
        await a.run_log.add("run", 0, "CreateModel", b"{}")
        await a.run_log.add("run", 1, "OptimStep", b"{}")
        b.leases.owner = "a"  # as the same server after a restart: its fencing number is another one
        assert await b.leases.claim_left(LEASED, "run")
        for write in (
            a.run_log.add("run", 2, "OptimStep", b"late"),
            a.run_log.finish("run", 1, {}),
            a.run_log.keep("run", 1, state(a, "late"), True),
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
        await store.run_log.add("run", 0, "CreateModel", b"{}")
        await store.run_log.keep("run", 0, folder := state(store, "state"), False)
        now = store.clock()
        await store.retention.sweep(now - 1000.0)
        assert await store.run_log.read("run") is not None, "its server has renewed the lease since then"
        await store.retention.sweep(now + 1000.0)
        assert await store.run_log.read("run") is None and not folder.exists()

    with Store(tmp_path / "a", owner="a") as store:
        asyncio.run(story(store))
