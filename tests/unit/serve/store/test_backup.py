"""Backups of a folder that a server writes to: whole or not there, and back with every file of every row."""

import asyncio
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.errors import StateError
from coserve.serve.store.backup import MANIFEST, back_up, restore
from coserve.serve.store.durable import write_whole
from coserve.serve.store.migrate import head_revision
from coserve.serve.store.records import Adapter, File
from coserve.serve.store.store import Store
from coserve.serve.store.usage import Used

OLD = Path(__file__).parents[3] / "newcomers" / "data" / "state-0.1.0.tar.xz"
NAMES = ("backup", "backup.tar", "backup.tar.gz")
RUN = "import sys; from pathlib import Path; from coserve.serve.store.backup import back_up, restore; "
BACK_UP = RUN + "back_up(Path(sys.argv[1]), Path(sys.argv[2]))"
RESTORE = RUN + "restore(Path(sys.argv[1]), Path(sys.argv[2]))"


@pytest.fixture(autouse=True)
def database() -> str:
    """A backup is of a SQLite database: no other is in the state folder."""
    return ""


async def add_file(store: Store, number: int, size: int) -> None:
    row = File(f"file-{number}", "local", f"{number}.jsonl", "fine-tune", size, 1, ".jsonl")
    write_whole(store.file_path(row), [bytes([number % 251]) * size])
    await store.files.add(row)


async def add_adapter(store: Store, number: int) -> None:
    folder = store.adapter_folder(f"ad-{number}")
    folder.mkdir()
    write_whole(folder / "adapter_model.safetensors", [b"w" * 100])
    row = Adapter(f"ad-{number}", f"a{number}", Path("adapters", f"ad-{number}"), "base", 1, "local")
    await store.adapters.add(row)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with files and adapters, and what a killed server leaves."""
    folder = tmp_path_factory.mktemp("filled") / "state"

    async def fill(store: Store) -> None:
        await store.usage.open()
        await store.tenants.create_key("ann")
        for number in range(40):
            await add_file(store, number, 3000)
        await add_adapter(store, 1)
        store.usage.add("local", "m", "", Used(1, 5))

    with Store(folder) as store:
        asyncio.run(fill(store))
    (folder / "files" / "file-gone.jsonl").write_bytes(b"no row")
    (folder / "files" / ".partial").write_bytes(b"half")
    return folder


def check(state: Path) -> int:
    """Opens a restored folder; the number of its files, all of which are as their rows say."""
    with Store(state) as store:
        rows = asyncio.run(store._database.read(lambda session: session.query(File).all()))
        for row in rows:
            number = int(row.id.removeprefix("file-"))
            assert store.file_path(row).read_bytes() == bytes([number % 251]) * row.bytes
        assert {path.name for path in (state / "files").iterdir()} == {row.id + row.suffix for row in rows}
        for adapter in asyncio.run(store.adapters.list("local", "base")):
            assert (store.folder_of(adapter) / "adapter_model.safetensors").read_bytes() == b"w" * 100
    return len(rows)


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_back_is_what_was_there(filled: Path, tmp_path: Path, name: str) -> None:
    made = back_up(filled, tmp_path / name)
    assert (
        made.files == 44 and not (filled / ".backup").exists()
    )  # and the database, the adapter, the journal and its name
    (tmp_path / "empty").mkdir()
    assert restore(tmp_path / name, tmp_path / "empty").bytes == made.bytes
    assert check(tmp_path / "empty") == 40
    with Store(tmp_path / "empty") as store:
        asyncio.run(store.usage.open())
        ((_, _, counts), *_) = asyncio.run(store.usage.rows(0, 2**40))
        assert counts["input_tokens"] == 5 and asyncio.run(store.tenants.any_keys())
    for path in (tmp_path / "empty").rglob("*"):
        assert not path.stat().st_mode & 0o077, path
    for target, state in ((tmp_path / name, filled), (filled / "inside", filled), (tmp_path / "x", tmp_path)):
        with pytest.raises(StateError):
            back_up(state, target)
    with pytest.raises(StateError, match="not empty"):
        restore(tmp_path / name, tmp_path / "empty")


def test_a_server_that_adds_and_deletes_meanwhile_is_copied_as_of_one_moment(tmp_path: Path) -> None:
    state, stop = tmp_path / "state", threading.Event()

    async def work(store: Store) -> None:
        draw, number = random.Random(2), 0
        there: list[int] = []
        while not stop.is_set():
            number += 1
            await add_file(store, number, draw.randrange(1, 2000))
            there.append(number)
            if len(there) > 20:
                gone = there.pop(draw.randrange(len(there)))
                row = await store.files.remove("local", f"file-{gone}")
                assert row is not None
                store.file_path(row).unlink()

    def run() -> None:
        with Store(state) as store:
            asyncio.run(work(store))

    writer = threading.Thread(target=run)
    writer.start()
    try:
        while not (state / "files").exists() or len(list((state / "files").iterdir())) < 20:
            time.sleep(0.01)
        counts = []
        for turn in range(3):
            back_up(state, tmp_path / f"backup-{turn}{('', '.tar')[turn % 2]}")
            restore(tmp_path / f"backup-{turn}{('', '.tar')[turn % 2]}", tmp_path / f"back-{turn}")
            counts.append(check(tmp_path / f"back-{turn}"))
    finally:
        stop.set()
        writer.join()
    assert all(19 <= count <= 21 for count in counts)


@pytest.mark.slow  # 10 s: a process for each kill
def test_a_kill_at_any_moment_leaves_nothing_half(filled: Path, tmp_path: Path) -> None:
    """Of a backup, and of a restoration."""
    draw, source = random.Random(4), tmp_path / "source.tar"
    back_up(filled, source)
    killed = 0
    for turn in range(6):
        target = tmp_path / ("target", "target.tar.gz", "state")[turn % 3]
        command = (
            [RESTORE, str(source), str(target)] if turn % 3 == 2 else [BACK_UP, str(filled), str(target)]
        )
        with subprocess.Popen([sys.executable, "-c", *command]) as process:
            while process.poll() is None and not (tmp_path / f".{target.name}.coserve-partial").exists():
                time.sleep(0.001)
            time.sleep(draw.random() * 0.05)
            process.send_signal(signal.SIGKILL)
        killed += not target.exists()
        if turn % 3 == 2:
            if target.exists():
                assert check(target) == 40
            else:
                restore(source, target)
            assert check(target) == 40
        else:
            if not target.exists():
                back_up(filled, target)
            restore(target, tmp_path / "again")
            assert check(tmp_path / "again") == 40
            shutil.rmtree(tmp_path / "again")
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert killed > 1


def test_damage_is_found_and_leaves_the_folder_as_it_was(filled: Path, tmp_path: Path) -> None:
    back_up(filled, tmp_path / "good")
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        tar.add(filled / "coserve.db", "../escaped")
    (tmp_path / "short.tar.gz").write_bytes(b"\x1f\x8b" + b"x" * 100)
    damages: dict[str, Callable[[Path], object]] = {
        "is not as its manifest": lambda copy: (copy / "files" / "file-3.jsonl").write_bytes(b"x" * 3000),
        "file-4.jsonl is not as": lambda copy: (copy / "files" / "file-4.jsonl").unlink(),
        "no whole backup": lambda copy: (copy / MANIFEST).unlink(),
        "it has 'other'": lambda copy: (copy / "other").write_text("x"),
        "newer coserve": lambda copy: (copy / MANIFEST).write_text(
            json.dumps(json.loads((copy / MANIFEST).read_text()) | {"revision": "9999"})
        ),
    }
    sources = {"no backup": tmp_path / "evil.tar", "no whole": tmp_path / "short.tar.gz"}
    for number, (said, damage) in enumerate(damages.items()):
        shutil.copytree(tmp_path / "good", copy := tmp_path / f"copy-{number}")
        damage(copy)
        sources[said] = copy
    for said, source in sources.items():
        with pytest.raises(StateError, match=said):
            restore(source, tmp_path / "state")
        assert not (tmp_path / "state").exists() and not (tmp_path / "escaped").exists()


def test_a_row_without_its_file_is_told_of(filled: Path, tmp_path: Path) -> None:
    shutil.copytree(filled, state := tmp_path / "state")
    (state / "files" / "file-7.jsonl").unlink()
    with pytest.raises(StateError, match=r"files/file-7\.jsonl"):
        back_up(state, tmp_path / "backup")
    assert not (tmp_path / "backup").exists() and not (state / ".backup").exists()
    for name in ("backup", "backup.tar"):  # unless several servers have their files elsewhere
        back_up(state, tmp_path / name, shared_artifacts=True)
        restore(tmp_path / name, tmp_path / f"back-{name}")
        assert len(list((tmp_path / f"back-{name}" / "files").iterdir())) == 39
    asked, said = ["backup", str(tmp_path / "of-flag"), "--state", str(state)], list[str]()
    for more in ([], ["--artifacts", "s3://bucket/prefix"]):
        ran = CliRunner().invoke(app, [*asked, *more])
        said.append(ran.output or str(ran.exception))
    assert "give --artifacts here" in said[0] and "the artifact store alone has" in said[1]
    back = CliRunner().invoke(app, ["restore", asked[1], "--state", str(tmp_path / "of-flag-back")])
    assert "--artifacts PLACE`" in back.output


def test_a_database_of_an_earlier_shape_is_upgraded_once_it_is_asked_for(
    filled: Path, tmp_path: Path
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, [*arguments, "--state", str(tmp_path)])
        return result.exit_code, result.output or str(result.exception)

    shutil.copy(filled / "coserve.db", tmp_path)
    head = head_revision()
    assert run("upgrade", "--check") == (
        0,
        f"database: shape {head}, this version's is {head}\nnothing to do\n",
    )
    with tarfile.open(OLD) as archive:
        database = archive.extractfile("state/coserve.db")
        assert database is not None
        (tmp_path / "coserve.db").write_bytes(database.read())
    code, said = run("upgrade", "--check")
    assert code == 0 and "0015  Tables for operators" in said and "cannot be undone" in said
    assert f"upgraded to shape {head}" in run("upgrade")[1] and "nothing to do" in run("upgrade")[1]
    with closing(sqlite3.connect(tmp_path / "coserve.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    code, said = run("upgrade")
    assert code == 1 and "newer coserve" in said
