"""Zip files of adapters: those that lead out of themselves, are too large, link, or are damaged."""

import asyncio
import io
import json
import random
import stat
import struct
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coserve.adapters.folder import CONFIG, WEIGHTS
from coserve.errors import AdapterError
from coserve.serve.adapter_registry import archives
from coserve.serve.adapter_registry.archives import MOST_FILES, packed, unpack
from coserve.serve.routes import transfers
from serving import Play, World
from training import upload

MOST = 100_000
FILES = {CONFIG: b'{"peft_type": "LORA", "r": 4}', WEIGHTS: struct.pack("<Q", 8) + b"{}      "}
Change = Callable[[zipfile.ZipFile], object]


def archive(
    files: dict[str, bytes] = FILES, change: Change = lambda made: None, method: int = zipfile.ZIP_DEFLATED
) -> io.BytesIO:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as made:
        for name, data in files.items():
            made.writestr(name, data)
        change(made)
    out.seek(0)
    return out


def below(folder: str) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in FILES.items()}


def link(made: zipfile.ZipFile) -> None:
    member = zipfile.ZipInfo("link")
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    made.writestr(member, "/etc/passwd")


def of_weights(target: str) -> Change:
    """Adds the weights as a link, instead of the file."""

    def change(made: zipfile.ZipFile) -> None:
        member = zipfile.ZipInfo(WEIGHTS)
        member.external_attr = (stat.S_IFLNK | 0o777) << 16
        made.writestr(member, target)

    return change


@pytest.mark.parametrize(
    "files", [FILES, below("mine"), {**FILES, "README.md": b"# me", "runs/log.txt": b"x"}]
)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_of_one_adapter_is_unpacked(files: dict[str, bytes], method: int, tmp_path: Path) -> None:
    unpack(archive(files, method=method), tmp_path, MOST)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == FILES
    (again := tmp_path / "again").mkdir()
    unpack(io.BytesIO(b"".join(packed(tmp_path))), again, MOST)
    assert {one.name: one.read_bytes() for one in again.iterdir()} == FILES


REFUSED: dict[str, tuple[io.BytesIO, str]] = {
    "parent": (archive({**FILES, "../../evil": b"x"}), "leads out"),
    "parents of the two": (archive(below("../x")), "leads out"),
    "absolute": (archive(below("/tmp")), "leads out"),
    "windows": (archive({**FILES, "C:evil": b"x"}), "leads out"),
    "link": (archive(change=link), "is a link"),
    "weights that are a link": (archive({CONFIG: FILES[CONFIG]}, of_weights("/etc/passwd")), "is a link"),
    "bomb": (archive({**FILES, WEIGHTS: bytes(MOST + 1)}), "larger than 100000 bytes"),
    "many": (archive({**FILES, **{f"{n}": b"" for n in range(MOST_FILES)}}), "more than 64 files"),
    "a large directory": (archive({**FILES, **{f"{n:0900}": b"" for n in range(400)}}), "more than 64 files"),
    "none": (archive({"adapter.bin": b"x"}), f"no files {CONFIG}"),
    "two": (archive({**FILES, **below("other")}), "has 2 files"),
    "apart": (archive({CONFIG: FILES[CONFIG], f"x/{WEIGHTS}": FILES[WEIGHTS]}), "different folders"),
    "method": (archive(method=zipfile.ZIP_BZIP2), "another method"),
    "no zip": (io.BytesIO(b"PK" + bytes(500)), "cannot be read as a zip file"),
    "empty": (io.BytesIO(), "cannot be read as a zip file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_others_are_refused_with_what_is_wrong(case: str, tmp_path: Path) -> None:
    file, words = REFUSED[case]
    (folder := tmp_path / "in").mkdir()
    with pytest.raises(AdapterError, match=words):
        unpack(file, folder, MOST)
    assert [one.name for one in tmp_path.iterdir()] == ["in"]
    assert not {one.name for one in folder.iterdir()} - set(FILES)
    assert sum(one.stat().st_size for one in folder.iterdir()) <= MOST + len(FILES[CONFIG])


def test_damaged_archives_are_refused_or_as_they_were(tmp_path: Path) -> None:
    draw, whole = random.Random(0), archive({**FILES, WEIGHTS: random.Random(1).randbytes(3000)}).getvalue()
    refused = 0
    for number in range(300):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.3:
            data = data[: draw.randrange(len(data))]
        (folder := tmp_path / str(number)).mkdir()
        try:
            unpack(io.BytesIO(bytes(data)), folder, MOST)
        except AdapterError:
            refused += 1
        else:
            assert (folder / CONFIG).read_bytes() == FILES[CONFIG]
    assert 200 < refused <= 300


def test_an_adapter_comes_in_and_goes_out_as_one_file(play: Play) -> None:
    async def story(world: World) -> None:
        keys = {name: (await world.state.store.tenants.create_key(name))[1] for name in ("ann", "bob")}
        ann, bob = ({"authorization": f"Bearer {keys[name]}"} for name in ("ann", "bob"))
        name = {"name": 'a "name"/<img>'}
        sent = {"archive": ("mine.zip", archive(below("mine")).getvalue())}
        made = await world.http.post("/v1/adapters", data=name, files=sent, headers=ann)
        assert made.status_code == 200 and made.json()["id"] == name["name"]
        path = "/v1/adapters/a%20%22name%22%2F%3Cimg%3E/archive"
        got = await world.http.get(path, headers=ann)
        assert got.status_code == 200 and got.headers["content-type"] == "application/zip"
        assert got.headers["content-disposition"] == 'attachment; filename="-img-.zip"'
        with zipfile.ZipFile(io.BytesIO(got.content)) as found:
            assert {one: found.read(one) for one in found.namelist()} == FILES
        assert (await world.http.get(path, headers=bob)).status_code == 404
        assert (await world.http.get("/v1/adapters/tiny/archive", headers=ann)).status_code == 404
        folder = world.state.store.folder / "adapters"
        before = sorted(folder.iterdir())
        evil = {"archive": ("x.zip", archive({**FILES, "../../evil": b"x"}).getvalue())}
        again = await world.http.post("/v1/adapters", data={"name": "evil"}, files=evil, headers=ann)
        assert again.status_code in (400, 422) and "leads out" in again.json()["error"]["message"]
        parts = {"config": (CONFIG, FILES[CONFIG]), **sent}
        for files in (parts, {"config": (CONFIG, FILES[CONFIG])}):
            mixed = await world.http.post("/v1/adapters", data={"name": "mixed"}, files=files, headers=ann)
            assert mixed.status_code == 422 and "one zip file" in json.dumps(mixed.json())
        assert sorted(folder.iterdir()) == before

    play(story)


def test_bombs_of_several_tenants_hold_up_nobody_else(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tenant has one unpacked at a time, on threads that nothing else needs, up to a bound."""
    monkeypatch.setattr(archives, "_ALWAYS", 2**16)
    goes_on, begun = threading.Event(), list[bytes]()

    def held(*given: Any) -> None:
        begun.append(b"")
        goes_on.wait(60)
        unpack(*given)

    monkeypatch.setattr(transfers, "unpack", held)

    async def story(world: World) -> None:
        create = world.state.store.tenants.create_key
        *bombers, other = [(await create(f"tenant-{number}"))[1] for number in range(6)]
        folder = world.state.store.folder / "adapters"
        before = sorted(folder.iterdir())
        sent = {"archive": ("x.zip", archive({**FILES, WEIGHTS: bytes(2**20)}).getvalue())}

        async def bomb(number: int) -> Any:
            headers = {"authorization": f"Bearer {bombers[number % len(bombers)]}"}
            name = {"name": f"bomb-{number}"}
            return await world.http.post("/v1/adapters", data=name, files=sent, headers=headers)

        bombs = asyncio.gather(*(bomb(number) for number in range(40)))  # more than asyncio has threads
        await world.until(lambda: len(begun) == 4)
        await upload(world, other, examples=3)
        assert len(begun) == 4 and not bombs.done()
        goes_on.set()
        for refused in await bombs:
            assert refused.status_code == 400, refused.text
            assert "more than 100 times the archive's bytes" in refused.json()["error"]["message"]
        assert sorted(folder.iterdir()) == before

    try:
        play(story)
    finally:
        goes_on.set()
