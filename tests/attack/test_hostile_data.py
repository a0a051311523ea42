"""Training files that mean harm: each is read or refused in a sentence, and harms nobody else."""

import asyncio
import io
import os
import random
import resource
import tracemalloc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest

from broken_data import MAKERS, bomb
from coserve.errors import DataError
from coserve.jobs import datasets
from coserve.jobs.containers import values
from coserve.jobs.datasets import RecordReader, count, read_rows
from coserve.jobs.limits import LIMITS, ReadLimits
from serving import Play, World
from training import upload

read_any = RecordReader("any")

TRIED = int(os.environ.get("COSERVE_ATTACK_DATA", "120"))
CHILDREN = 12  # of these, files that a process of their own reads: 0.3 s each
LONGEST = 1300  # characters of what is said about one


@pytest.mark.sample(2)
@pytest.mark.parametrize("suffix", MAKERS)
def test_each_file_is_read_or_refused_in_a_sentence(tmp_path: Path, suffix: str) -> None:
    outcomes = {"read": 0, "refused": 0}
    path = tmp_path / f"a{suffix}"
    for seed in range(CHILDREN if suffix == ".parquet" else TRIED):
        path.write_bytes(MAKERS[suffix](random.Random(f"{suffix}/{seed}")))
        try:
            for _ in read_any(path):
                pass
            outcomes["read"] += 1
        except DataError as error:
            outcomes["refused"] += 1
            said = str(error)
            assert said.startswith(path.name) and len(said) <= LONGEST and len(said.splitlines()) <= 3
    assert outcomes["refused"] > 0
    if suffix != ".parquet" or find_spec("pyarrow"):
        assert outcomes["read"] > 0  # what nobody could read would try little


def test_a_bomb_takes_no_memory_and_little_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(bomb(64))
    assert path.stat().st_size < 150_000
    tracemalloc.start()
    try:
        # In this process, as a sandbox reads it.
        with pytest.raises(DataError, match="expected to unpack to at most 16777216 bytes"):
            for _ in values(path, path.name, LIMITS):
                pass
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
    with pytest.raises(DataError, match="expected to unpack to at most 16777216 bytes"):
        count(path, path.name, ReadLimits(seconds=8.0))
    path.write_bytes(bomb(0)[:20] + b"\x00" * 100)
    with pytest.raises(DataError, match="whole gzip file"):
        list(read_any(path))


def test_a_line_without_an_end_is_not_read_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(2**33)  # zeros that take no space on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="line 1: expected at most 16777216 bytes"):
        list(read_any(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10


def test_columns_that_expand_beyond_all_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    file = io.BytesIO()
    text = pyarrow.array(["a" * 2**20]).take(
        pyarrow.array([0] * 150)
    )  # 150 MiB, as one entry of a dictionary
    write_table(pyarrow.table({"text": text}), file, compression="zstd", use_dictionary=True)
    assert len(file.getvalue()) < 100_000
    path = tmp_path / "a.parquet"
    path.write_bytes(file.getvalue())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"row \d+: expected to unpack to at most"):
        for _ in read_rows(path, "a", ReadLimits(unpacked=2**26)):
            pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 2**10
    monkeypatch.setattr(datasets, "_MEMORY", 600 * 2**20)
    huge = pyarrow.table({"text": pyarrow.array(["a" * (300 * 2**20)])})
    file = io.BytesIO()
    write_table(huge, file, compression="zstd")
    path.write_bytes(file.getvalue())
    with pytest.raises(DataError, match=r"at most|ended with|takes more than 600 MiB"):
        list(read_rows(path, "a"))


async def send(world: World, key: str, name: str, data: bytes) -> Any:
    """The file that was made of it, or the refusal."""
    try:
        return await world.client(key).files.create(file=(name, data), purpose="fine-tune")
    except openai.BadRequestError as error:
        return error


def test_files_of_one_tenant_harm_no_other(play: Play) -> None:
    async def story(world: World) -> None:
        keys: dict[str, str] = {}
        for name in ("attacker", "other"):
            _, keys[name] = await world.state.store.tenants.create_key(name)
        draws = random.Random(7)
        bad = [(f"a{suffix}", make(draws)) for suffix, make in MAKERS.items() for _ in range(5)]
        bad += [("bomb.jsonl.gz", bomb(40))] * 3
        attack = asyncio.gather(*(send(world, keys["attacker"], name, data) for name, data in bad))
        mine, meanwhile = [], 0
        while not attack.done() or len(mine) < 3:
            mine.append(await upload(world, keys["other"], examples=3))
            meanwhile += not attack.done()
        assert meanwhile  # it waits for one file of the attacker's at most, and not for all
        for answer in await attack:
            if isinstance(answer, openai.BadRequestError):
                assert answer.code in ("invalid_file", None) and len(str(answer.message)) < LONGEST + 300
        listed = [file.id async for file in world.client(keys["other"]).files.list()]
        assert sorted(listed) == sorted(mine)
        kept = {path.name.partition(".")[0] for path in world.state.settings.files.iterdir()}
        stored = {file.id async for file in world.client(keys["attacker"]).files.list()}
        assert kept == {*mine, *stored}  # nothing of what was refused stays

    play(story)
