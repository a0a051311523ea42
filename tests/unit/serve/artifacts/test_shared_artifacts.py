"""Artifacts that servers share: whole or missing, the same everywhere, and bounded where they are copied."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from coserve.errors import ConfigError, StateError
from coserve.serve.artifacts import objects, shared
from coserve.serve.artifacts.objects import check_place, objects_at
from coserve.serve.artifacts.shared import MANIFEST, SharedArtifacts
from object_store import URL, ObjectStoreServer, object_store

Story = Callable[[SharedArtifacts, SharedArtifacts], Coroutine[Any, Any, None]]
PARTS = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights" * 100, "training.json": b"1"}


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "common")
        return
    with object_store(monkeypatch):
        yield URL


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStoreServer]:
    monkeypatch.setattr(objects, "_RETRIES", 1)
    monkeypatch.setattr(objects, "_SECONDS", 1)
    with object_store(monkeypatch) as server:
        yield server


def tell(story: Story, tmp_path: Path, place: str, most: int = 10**9) -> None:
    """Runs a story of two servers."""

    async def whole() -> None:
        pair = []
        for name in "ab":
            (tmp_path / name).mkdir(exist_ok=True)
            pair.append(SharedArtifacts(tmp_path / name, objects_at(place), most))
        try:
            await story(*pair)
            for each in pair:
                await each.settled()
        finally:
            for each in pair:
                each.close()

    asyncio.run(whole())


def adapter(folder: Path, name: str = "adapters/adapter-1", **changed: bytes) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    for each, data in PARTS.items():
        (path / each).write_bytes(changed.get(each.partition(".")[0], data))
    return path


async def stays(_: str) -> bool:
    return False


async def leaves(_: str) -> bool:
    return True


def found(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


def test_what_one_server_puts_another_gets_trims_and_deletes(tmp_path: Path, place: str) -> None:
    async def story(a: SharedArtifacts, b: SharedArtifacts) -> None:
        here, there = adapter(tmp_path / "a"), tmp_path / "b" / "adapters" / "adapter-1"
        (tmp_path / "a" / "files").mkdir()
        (tmp_path / "a" / "files" / "file-1.jsonl").write_bytes(b"a line\n")
        await b.get(there)
        assert not there.exists() and not b.is_here(there)
        await a.put(here)
        await a.put(here)
        await a.put(tmp_path / "a" / "files" / "file-1.jsonl")
        await asyncio.gather(*(b.get(there) for _ in range(4)))
        assert found(there) == PARTS and b.downloads == 1
        assert (await b.get(tmp_path / "b" / "files" / "file-1.jsonl")).read_bytes() == b"a line\n"
        await b.trim(there, ("training.json",))
        await b.settled()
        (await a.get(here)).rename(tmp_path / "away")
        assert found(await a.get(here)).keys() == PARTS.keys() - {"training.json"}
        await a.discard(tmp_path / "a" / "adapters")
        await a.settled()
        assert not here.exists()
        assert [one.key for one in objects_at(place).list("adapters")] == []
        assert len(list(objects_at(place).list("files"))) == 2

    tell(story, tmp_path, place)


def test_the_first_to_put_a_version_wins_everywhere(tmp_path: Path, place: str) -> None:
    async def story(a: SharedArtifacts, b: SharedArtifacts) -> None:
        one, other = adapter(tmp_path / "a"), adapter(tmp_path / "b", adapter_model=b"others")
        await asyncio.gather(a.put(one), b.put(other))
        assert found(one) == found(other)
        (tmp_path / "b" / "adapters" / "adapter-1" / "training.json").write_bytes(b"2")
        await b.put(other, replace=True)
        await a.put(one)
        assert found(one)["training.json"] == b"2"

    tell(story, tmp_path, place)


def test_copies_leave_beyond_their_bound_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "KEPT_SECONDS", 0.0)

    async def story(a: SharedArtifacts, b: SharedArtifacts) -> None:
        paths = [adapter(tmp_path / "a", f"adapters/adapter-{i}") for i in range(4)]
        asked = []

        async def may_leave(name: str) -> bool:
            asked.append(name)
            return name != "adapters/adapter-0"

        a.may_leave = may_leave
        for path in paths:
            await a.put(path)
            while a._tidying is not None and not a._tidying.done():
                await asyncio.sleep(0.001)
        left = [path.name for path in paths if path.exists()]
        assert left == ["adapter-0", "adapter-3"] and a.evictions == 2
        assert asked[0] == "adapters/adapter-0"
        assert found(await a.get(paths[1])) == PARTS
        monkeypatch.setattr(shared, "KEPT_SECONDS", 60.0)
        assert found(await a.get(paths[2])) == PARTS
        assert all(path.exists() for path in paths[1:3])  # what was just used stays, beyond the bound

    size = sum(map(len, PARTS.values()))
    tell(story, tmp_path, str(tmp_path / "common"), 2 * size)


def test_a_copy_that_the_store_lacks_is_put_before_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "KEPT_SECONDS", 0.0)

    async def story(a: SharedArtifacts, b: SharedArtifacts) -> None:
        a.may_leave = stays
        path = adapter(tmp_path / "a", "tinker/tinker-1")
        await a.adopt()
        put = [one.key for one in a._objects.list("tinker")]
        assert len(put) == 1 + len(PARTS)
        for key in put:
            a._objects.delete(key)
        a.may_leave = leaves
        await a._make_room()
        assert not path.exists()
        await a._run(a._get, path)
        assert found(path) == PARTS

    tell(story, tmp_path, str(tmp_path / "common"), 1)


def test_objects_without_a_row_go_once_they_are_old(tmp_path: Path, place: str) -> None:
    async def story(a: SharedArtifacts, b: SharedArtifacts) -> None:
        for i in range(2):
            await a.put(adapter(tmp_path / "a", f"adapters/adapter-{i}"))
        await a.sweep("adapters", {"adapters/adapter-0"}, time.time())
        assert found(await b.get(tmp_path / "b" / "adapters" / "adapter-1")) == PARTS
        await a.sweep("adapters", {"adapters/adapter-0"}, time.time() + 2 * shared.ORPHAN_SECONDS)
        left = {one.key.split("/")[1] for one in objects_at(place).list("adapters")}
        assert left == {"adapter-0"}

    tell(story, tmp_path, place)


@pytest.mark.parametrize("fault", ["full", "slow", "gone"])
def test_a_store_that_is_full_slow_or_gone_says_so_and_nothing_is_half_there(
    tmp_path: Path, s3: ObjectStoreServer, fault: str
) -> None:
    async def story(a: SharedArtifacts, b: SharedArtifacts) -> None:
        path = adapter(tmp_path / "a")
        if fault == "full":  # after the first file
            s3.most = 1
        elif fault == "slow":
            s3.slow = 1.5
        else:
            s3.close()
        with pytest.raises(
            StateError, match=r"the artifact store s3://bucket/prefix cannot be used now .*try again"
        ):
            await a.put(path)
        assert found(path) == PARTS
        assert not any(key.endswith(MANIFEST) for key in s3.objects)
        if fault == "gone":
            return
        s3.most, s3.slow = 100, 0.0
        await a.put(path)
        assert found(await b.get(tmp_path / "b" / "adapters" / "adapter-1")) == PARTS

    tell(story, tmp_path, URL)


def test_damaged_bytes_and_manifests_are_refused(tmp_path: Path, s3: ObjectStoreServer) -> None:
    async def story(a: SharedArtifacts, b: SharedArtifacts) -> None:
        await a.put(adapter(tmp_path / "a"))
        there = tmp_path / "b" / "adapters" / "adapter-1"
        manifest = f"prefix/adapters/adapter-1/{MANIFEST}"
        whole = s3.objects[manifest]
        for key in [key for key in s3.objects if key != manifest]:
            s3.objects[key] = b"other" + s3.objects[key]
        with pytest.raises(
            StateError, match=r"adapters/adapter-1 is damaged in the artifact store: a file's hash"
        ):
            await b.get(there)
        for bad in (
            b"{",
            whole.replace(b"adapter_config", b"../adapter"),
            b'{"files": 3}',
            b"x" * (2**20 + 1),
        ):
            s3.objects[manifest] = bad
            with pytest.raises(StateError, match=r"damaged|no manifest"):
                await b.get(there)
        assert not there.exists() and not os.listdir(there.parent)

    tell(story, tmp_path, URL)


def test_large_files_go_and_come_in_pieces(tmp_path: Path, s3: ObjectStoreServer) -> None:
    async def story(a: SharedArtifacts, b: SharedArtifacts) -> None:
        weights = os.urandom(12 * 2**20)
        await a.put(adapter(tmp_path / "a", adapter_model=weights))
        assert any(method == "POST" for method, _ in s3.asked)
        got = found(await b.get(tmp_path / "b" / "adapters" / "adapter-1"))
        assert got["adapter_model.safetensors"] == weights

    tell(story, tmp_path, URL)


@pytest.mark.parametrize("bad", ["s3://", "ftp://host/x", " /a", "s3:///", "a\x00b"])
def test_a_place_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="artifacts is"):
        check_place(bad)
