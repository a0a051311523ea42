"""Uploads that take long: their time grows with their size at most, has an end, and ends with their client.

`COSERVE_ATTACK_GROWTH` sets how many of each thing the long run has.
"""

import asyncio
import contextlib
import gzip
import json
import math
import os
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from coserve.errors import DataError
from coserve.jobs import child, datasets
from coserve.jobs.limits import LIMITS, ReadLimits
from growing_data import ANSWER, USER, columns, equal_rows, files, parquet, readers, slow_file
from serving import Play, World, listening
from training import upload

HOW_MANY = int(os.environ.get("COSERVE_ATTACK_GROWTH", "40000"))
FEW = 1000
# Nothing but the time bounds these.
UNBOUND = ReadLimits(rows=10**9, few_rows=10**9, columns=10**9, values=10**9, turns=10**9)
NOTICED = 0.02  # seconds: what takes less is not looked at
STEEPEST = 1.5  # of an exponent; the clock of a busy machine adds 0.2 to one


def seconds(path: Path, data: bytes, limits: ReadLimits = UNBOUND) -> float:
    """Processor time of reading a file where its sandbox would."""
    path.write_bytes(data)
    began = time.process_time()
    with contextlib.suppress(DataError):
        child.read("count", str(path), "a", None, asdict(limits))
    return time.process_time() - began


def check_growth(folder: Path, few: int) -> None:
    smaller, larger = (
        files(n) | {f"{name} of columns": ("parquet", data) for name, data in columns(n).items()}
        for n in (few, 4 * few)
    )
    steep = {}
    for name, (suffix, data) in larger.items():
        path = folder / f"a.{suffix}"
        before, after = seconds(path, smaller[name][1]), seconds(path, data)
        assert after < LIMITS.most_seconds(len(data)), name
        for _ in range(3):  # again where something else may have taken the time
            exponent = math.log(after / max(before, 1e-4), 4)
            if after < NOTICED or exponent < STEEPEST:
                break
            before, after = max(before, seconds(path, smaller[name][1])), min(after, seconds(path, data))
        else:
            steep[name] = round(exponent, 2), round(after, 2)
    assert not steep


def test_time_grows_with_what_is_repeated(tmp_path: Path) -> None:
    check_growth(tmp_path, FEW)


@pytest.mark.slow
def test_time_grows_with_what_is_repeated_many_times(tmp_path: Path) -> None:
    check_growth(tmp_path, HOW_MANY)


def test_small_files_that_would_take_long_are_refused_at_once(tmp_path: Path) -> None:
    turns = [{**USER, "content": str(i)} for i in range(20_000)]
    cases: dict[str, tuple[str, bytes, str]] = {
        "turns": (
            "jsonl",
            json.dumps({"messages": [turn for user in turns for turn in (user, ANSWER)]}).encode(),
            r'^a, line 1: expected at most 2048 messages in "messages"; found 40000: .*max_chat_turns$',
        ),
        "columns": (
            "csv",
            ",".join(map(str, range(40_000))).encode(),
            "^a, line 1: expected at most 1000 columns; found 40000$",
        ),
        "newlines": (
            "jsonl.gz",
            gzip.compress(b"\n" * 2**24, mtime=0),
            "expected at most 1163.. lines: split",
        ),
        "rows": (
            "parquet",
            parquet(equal_rows(4_000_000)) if find_spec("pyarrow") else b"",
            r"^a: expected at most .* rows; found 40",
        ),
    }
    for name, (suffix, data, said) in cases.items():
        if not data:
            continue
        path = tmp_path / f"{name}.{suffix}"
        path.write_bytes(data)
        with pytest.raises(DataError, match=said):
            datasets.count(path, "a", replace(LIMITS, seconds=1.0))


def test_reading_ends_with_the_client_and_with_the_server(play: Play) -> None:
    """And neither another upload of the tenant nor the end of the server waits for it."""

    async def story(world: World) -> None:
        form: dict[str, Any] = {"data": {"purpose": "fine-tune"}}
        form["files"] = {"file": ("a.jsonl", slow_file())}

        async def sent(http: httpx.AsyncClient, timeout: float) -> None:
            with contextlib.suppress(httpx.HTTPError):
                await http.post("/v1/files", timeout=timeout, **form)

        async def is_read() -> None:
            while not await asyncio.to_thread(lambda: list(readers(os.getpid()))):
                await asyncio.sleep(0.05)

        async def rests() -> float:
            """Waits for all readers' end; the processor seconds that they use meanwhile."""
            begun, last = dict[int, float](), dict[int, float]()
            while found := await asyncio.to_thread(lambda: list(readers(os.getpid()))):
                for one in found:
                    with contextlib.suppress(psutil.Error):
                        last[one.pid] = sum(one.cpu_times()[:2])
                        begun.setdefault(one.pid, last[one.pid])
                await asyncio.sleep(0.05)
            return sum(last.values()) - sum(begun.values())

        async with listening(world.app) as url, httpx.AsyncClient(base_url=url) as http:
            sending = asyncio.create_task(sent(http, 60.0))
            await is_read()
            sending.cancel()
            await asyncio.wait([sending])
            assert await rests() < 3  # the whole file takes ten or so
            await upload(world)  # it is the same tenant's turn
            await world.until(lambda: len(list(world.state.settings.files.iterdir())) == 1)
            sending = asyncio.create_task(sent(http, 60.0))
            await is_read()
        # The listener has stopped: what it served is cancelled, in a server after five seconds.
        await rests()
        await sending

    play(story)
