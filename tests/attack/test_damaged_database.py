"""Databases damaged in every way a seed brings about: each is opened and works, or is refused in one sentence
that says what to do. Nothing else is ever raised, and doctor says the same.

`COSERVE_DAMAGES` sets how many the long run tries.
"""

import asyncio
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from coserve.cli.checks import run_checks
from coserve.errors import StateError
from coserve.serve.settings import ServerSettings
from coserve.serve.store.store import Store

Damage = Callable[[Path, random.Random], None]


def garbage(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(draw.choice((1, 100, 4096, 100_000))))


def truncated(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def overwritten(path: Path, draw: random.Random) -> None:
    with path.open("r+b") as file:
        for _ in range(draw.choice((1, 3, 20))):
            file.seek(draw.randrange(path.stat().st_size))
            file.write(draw.randbytes(draw.choice((1, 16, 512))))


def header(path: Path, draw: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(draw.randrange(100))
        file.write(draw.randbytes(draw.choice((1, 4, 30))))


def folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def dangling(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere" / "at all")


def pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def log(path: Path, draw: random.Random) -> None:
    path.with_name(f"{path.name}-wal").write_bytes(draw.randbytes(draw.choice((10, 5000, 50_000))))
    path.with_name(f"{path.name}-shm").write_bytes(draw.randbytes(draw.choice((10, 32768))))


def empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def sql(*statements: str) -> Damage:
    def run(path: Path, draw: random.Random) -> None:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute(draw.choice(statements))
        connection.commit()
        connection.close()

    return run


def foreign(path: Path, draw: random.Random) -> None:
    path.unlink()
    sql("CREATE TABLE tenants (colour TEXT)", "CREATE TABLE birds (name TEXT)")(path, draw)


version = sql(
    "UPDATE alembic_version SET version_num = '9999'",
    "UPDATE alembic_version SET version_num = ''",
    "INSERT INTO alembic_version VALUES ('0001')",
    "DELETE FROM alembic_version",
    "DROP TABLE alembic_version",
)
tables = sql(*(f"DROP TABLE {name}" for name in ("tenants", "keys", "jobs", "files", "adapters")))
schema = sql("DELETE FROM sqlite_master WHERE rowid = 3", "UPDATE sqlite_master SET sql = 'nonsense'")
DAMAGES: tuple[Damage, ...] = (
    garbage, truncated, overwritten, header, folder, dangling, pipe, log, empty, foreign, version, tables,
    schema,
)  # fmt: skip


async def use(store: Store) -> None:
    """A little of everything; StateError is how a database may fail later on."""
    await store.tenants.create_key("someone", None)
    await store.tenants.keys()
    await store.tenants.list()
    await store.adapters.pinned("base")


def strike(state: Path, seed: int) -> str:
    """Damages a database and opens it. Returns the error's message, or "works"."""
    draw = random.Random(seed)
    store = Store(state)
    for number in range(20):
        asyncio.run(store.tenants.create_key(f"tenant{number}", None))
    store.close()
    damage = DAMAGES[seed % len(DAMAGES)]
    damage(state / "coserve.db", draw)
    shutil.copytree(state, state.with_name("copy"), symlinks=True, copy_function=_copy)
    checks = run_checks(ServerSettings(model="m", state=state.with_name("copy"), port=0))
    found = [check for check in checks if check.what == "database"]
    try:
        with Store(state) as store:
            asyncio.run(use(store))
    except StateError as error:
        message = str(error)
        assert "\n" not in message and str(state) in message, (seed, message)
        assert any(word in message for word in ("move", "update", "give", "put")), (seed, message)
        return message
    assert not found, (seed, found)
    return "works"


def _copy(source: str, target: str) -> str:
    if Path(source).is_fifo():
        os.mkfifo(target)
        return target
    return str(shutil.copy2(source, target))


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(2 * len(DAMAGES)))
def test_a_damaged_database_is_told_of_in_one_sentence(seed: int, tmp_path: Path) -> None:
    strike(tmp_path / "state", seed)


@pytest.mark.slow
def test_many_damaged_databases(tmp_path: Path) -> None:
    count = int(os.environ.get("COSERVE_DAMAGES", "1000"))
    taken = []
    for seed in range(count):
        state = tmp_path / str(seed) / "state"
        state.parent.mkdir()
        taken.append(strike(state, seed))
        shutil.rmtree(state.parent)
    works = taken.count("works")
    print(
        f"{count} databases damaged: {works} work all the same, {count - works} are refused in one sentence"
    )
