"""Backups that are damaged or forged, names beside what is somebody else's, and what a kill leaves."""

import asyncio
import io
import random
import tarfile
from pathlib import Path

import msgspec
import pytest

from coserve.errors import StateError
from coserve.serve.store import backup
from coserve.serve.store.backup import DATABASE, MANIFEST, Manifest, back_up, restore
from coserve.serve.store.migrate import head_revision
from coserve.serve.store.store import Store
from serving import Play, World


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "state"
    with Store(folder) as store:
        asyncio.run(store.tenants.create_key("ann"))
        asyncio.run(store.usage.open())
    return folder


@pytest.mark.parametrize("name", ["config", "ssh.tar"])
def test_hidden_neighbours_of_a_target_are_left_alone(state: Path, tmp_path: Path, name: str) -> None:
    (mine := tmp_path / f".{name}").mkdir()
    (mine / "id").write_text("mine")
    back_up(state, tmp_path / name)
    restore(tmp_path / name, tmp_path / "back")
    (mine := tmp_path / ".again").write_text("mine")
    restore(tmp_path / name, tmp_path / "again")
    assert mine.read_text() == "mine" and (tmp_path / f".{name}" / "id").read_text() == "mine"
    places = [path for path in (tmp_path / name, *(tmp_path / name).rglob("*"))]
    assert not [path for path in places if path.stat().st_mode & 0o077]


@pytest.mark.parametrize("name", ["backup.tar", "backup.tar.gz"])
def test_damage_is_told_in_a_sentence(state: Path, tmp_path: Path, name: str) -> None:
    back_up(state, good := tmp_path / name)
    whole, draw, refused = good.read_bytes(), random.Random(5), 0
    for turn in range(20):
        damaged = bytearray(whole[: draw.randrange(len(whole))] if turn % 2 else whole)
        for _ in range(draw.randrange(1, 4)):
            # Half of the places are in heads, of 512 bytes at the beginning of each member.
            place = draw.randrange(len(damaged)) if turn % 4 else draw.randrange(min(600, len(damaged)))
            damaged[place] ^= 1 << draw.randrange(8)
        (bad := tmp_path / f"bad-{name}").write_bytes(damaged)
        try:
            restore(bad, target := tmp_path / f"target-{turn}")
        except StateError as error:
            refused += 1
            assert str(bad) in str(error) and not target.exists()
    assert refused > 14 and not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def forged(path: Path, members: dict[str, bytes], manifest: bytes | None = None) -> Path:
    files = {name: (len(data), backup.hashlib.sha256(data).hexdigest()) for name, data in members.items()}
    told = msgspec.json.encode(Manifest(head_revision(), 1, files)) if manifest is None else manifest
    with tarfile.open(path, "w") as tar:
        for name, data in {**members, MANIFEST: told}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_forged_backups_are_refused(state: Path, tmp_path: Path) -> None:
    database = (state / DATABASE).read_bytes()
    hostile: dict[str, tuple[dict[str, bytes], bytes | None]] = {
        "dot": ({DATABASE: database, ".": b"x"}, None),
        "absolute": ({DATABASE: database, str(tmp_path / "escaped"): b"x"}, None),
        "upwards": ({DATABASE: database, "files/../../escaped": b"x"}, None),
        "below the database": ({DATABASE: database, f"{DATABASE}/x": b"x"}, None),
        "no database": ({"files/x": b"x"}, None),
        "an empty database": ({DATABASE: b""}, None),
        "another database": ({DATABASE: b"SQLite format 3\0" + bytes(4096)}, None),
        "no text": ({DATABASE: database}, b'{"revision": "\xff\xfe"}'),
        "deep": ({DATABASE: database}, b"[" * 100_000),
        "a long name": ({DATABASE: database, "files/" + "x" * 5000: b"x"}, None),
    }
    for name, (members, manifest) in hostile.items():
        source = forged(tmp_path / f"{name}.tar", members, manifest)
        with pytest.raises(StateError):
            restore(source, tmp_path / "state")
        assert not (tmp_path / "state").exists() and not (tmp_path / "escaped").exists(), name
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
        with tarfile.open(tmp_path / "odd.tar", "w") as tar:
            info = tarfile.TarInfo("files/x")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        with pytest.raises(StateError, match="is no file"):
            restore(tmp_path / "odd.tar", tmp_path / "state")


def test_a_server_that_starts_drops_what_a_killed_backup_had_linked(play: Play, tmp_path: Path) -> None:
    (tmp_path / "state" / ".backup" / "files").mkdir(parents=True)
    (tmp_path / "state" / ".backup" / "files" / "deleted-by-its-tenant").write_text("x")

    async def story(world: World) -> None:
        assert not (world.state.settings.state / ".backup").exists()
        (stage := world.state.settings.state / ".backup").mkdir()
        with backup._lock(world.state.settings.state):  # one that is under way
            backup.sweep_stage(world.state.settings.state)
            assert stage.exists()

    play(story)
