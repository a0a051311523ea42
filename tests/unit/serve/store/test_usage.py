"""Usage by hour: nothing that was acknowledged is lost or counts twice, whatever ends the process."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import text

from coserve.errors import StateError
from coserve.serve.store.store import Store
from coserve.serve.store.usage import COUNTS, HOUR, Used
from coserve.wire.logs import CONTEXT, WorkContext

# Adds lines and acknowledges each on stdout; merges as the server does. Ends at a kill alone.
WRITER = """
import asyncio, sys
from pathlib import Path
from coserve.serve.store.store import Store
from coserve.serve.store.usage import Used
async def main(store):
    await store.usage.open()
    number = int(sys.argv[2])
    while True:
        for _ in range(5):
            number += 1
            store.usage.add("ann", "m", "", Used(1, number))
            sys.stdout.write(f"{number}\\n")
            sys.stdout.flush()
        await store.usage.merge()
with Store(Path(sys.argv[1])) as store:
    asyncio.run(main(store))
"""


def totals(store: Store, width: int = HOUR) -> Counter[tuple[str, ...]]:
    found: Counter[tuple[str, ...]] = Counter()
    for _, names, counts in asyncio.run(store.usage.rows(0, 2**40, width)):
        for name in COUNTS:
            found[(*names.values(), name)] += counts[name]
    return +found


def test_sums_by_hour_and_day_are_those_of_all_lines(tmp_path: Path) -> None:
    draw, now = random.Random(3), [1_700_000_000.0]
    wanted: Counter[tuple[object, ...]] = Counter()

    async def story(store: Store) -> None:
        for _ in range(3):  # lines before the journal is open wait
            store.usage.add("ann", "m", "", Used(1, 7))
        wanted[int(now[0]) // HOUR * HOUR, "ann"] += 3
        await store.usage.open()
        for _ in range(200):
            now[0] += draw.random() * 2000
            tenant, key = draw.choice("ab"), draw.choice(("", "k1", "k2"))
            CONTEXT.set(WorkContext(key=key))
            used = Used(*(draw.randrange(1000) for _ in COUNTS))
            store.usage.add(tenant, draw.choice("mn"), draw.choice(("", "v")), used)
            hour = int(now[0]) // HOUR * HOUR
            wanted[hour, tenant] += used.requests
            wanted[tenant, key] += used.trained_tokens
            wanted[hour // 86400, tenant, "day"] += used.output_tokens
            if draw.random() < 0.1:
                await store.usage.merge()
        await store.usage.merge()
        found: Counter[tuple[object, ...]] = Counter()
        for start, names, counts in await store.usage.rows(0, 2**40):
            found[start, names["tenant"]] += counts["requests"]
            found[names["tenant"], names["key"]] += counts["trained_tokens"]
        for start, names, counts in await store.usage.rows(0, 2**40, 86400, ("tenant",)):
            found[start // 86400, names["tenant"], "day"] += counts["output_tokens"]
        assert +found == +wanted
        only = await store.usage.rows(0, 2**40, tenant="a", most=2)
        assert {names["tenant"] for _, names, _ in only} == {"a"} and len({row[0] for row in only}) == 2
        assert await store.usage.sweep(min(start for start, *_ in only) + 1)
        assert not await store.usage.sweep(min(start for start, *_ in only) + 1)

    with Store(tmp_path, clock=lambda: now[0]) as store:
        asyncio.run(story(store))


def test_a_kill_loses_no_line_and_counts_none_twice(tmp_path: Path, database: str) -> None:
    if database:
        pytest.skip("the process that is killed opens the database of its folder")
    draw, told = random.Random(5), 0
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(told)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(draw.randrange(8, 60)):
                told = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            told = max([told, *map(int, writer.stdout.read().split())])
        with Store(tmp_path) as store:
            asyncio.run(store.usage.open())
            sums = totals(store)
        requests = sums["ann", "", "m", "", "requests"]
        assert requests in (told, told + 1)  # the last line may have been written and not been told of
        assert sums["ann", "", "m", "", "input_tokens"] == requests * (requests + 1) // 2
        told = requests


def test_a_segment_that_was_merged_when_the_process_died_is_not_merged_again(tmp_path: Path) -> None:
    async def write(store: Store, keep: bool) -> None:
        await store.usage.open()
        store.usage.add("ann", "m", "", Used(1, 10))
        (segment,) = (tmp_path / "usage").glob("*.jsonl")
        data = segment.read_bytes()
        await store.usage.merge()
        assert not segment.exists()
        if keep:
            segment.write_bytes(data + b'[1, "torn')
            odd = b'[1, ["t"], "", "m", "", 1, 5, 0, 0, 0]\n' + b"[" * 100_000 + b"\n" + data
            segment.with_name("7.jsonl").write_bytes(odd)  # as a damaged disk has it

    with Store(tmp_path) as store:
        asyncio.run(write(store, keep=True))
    with Store(tmp_path) as store:
        asyncio.run(store.usage.open())
        assert totals(store)["ann", "", "m", "", "input_tokens"] == 20
        asyncio.run(write(store, keep=False))
        assert totals(store)["ann", "", "m", "", "input_tokens"] == 30


def test_a_full_disk_delays_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it takes a part of one."""
    real, room = os.write, [5]

    def scarce(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError("No space left on device")
        taken, room[0] = min(room[0], len(data)), room[0] - min(room[0], len(data))
        return real(file, data[:taken])

    async def story(store: Store) -> None:
        await store.usage.open()
        monkeypatch.setattr("coserve.serve.store.usage.os.write", scarce)
        for _ in range(3):
            store.usage.add("ann", "m", "", Used(1, 10))
        await store.usage.merge()
        assert not await store.usage.rows(0, 2**40)
        room[0] = 10**6
        await store.usage.merge()

    with Store(tmp_path) as store:
        asyncio.run(story(store))
        assert totals(store)["ann", "", "m", "", "input_tokens"] == 30


def test_the_audit_log_tells_of_keys_and_cannot_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coserve.serve.store.audit.MOST_AUDITED", 3)

    async def story(store: Store) -> None:
        CONTEXT.set(WorkContext("req_1", tenant="operator eve", address="::1"))
        key, secret = await store.tenants.create_key("ann", 2)
        assert await store.tenants.revoke_key(key.id) and await store.tenants.forget_keys()
        rows = await store.audit.list()
        assert [row.action for row in rows] == ["key.created", "key.revoked", "keys.forgotten"]
        who = {(row.actor, row.request_id, row.address) for row in rows}
        assert who == {("operator eve", "req_1", "::1")}
        assert rows[0].details == f"{key.prefix}, weight 2" and secret not in str([vars(row) for row in rows])
        (tenant,) = {row.tenant for row in rows[:2]}
        assert len(await store.audit.list(tenant)) == 2 and not await store.audit.list(since=2**40)
        with pytest.raises(Exception, match="append-only"):
            await store._database.write(lambda session: session.execute(text("UPDATE audit SET actor = 'x'")))
        for _ in range(5):
            await store.audit.note("limits.reloaded", "", tenant)
        await store.audit.sweep(0.0)
        kept = await store.audit.list()
        assert [row.action for row in kept] == ["keys.forgotten", *["limits.reloaded"] * 3]  # its own alone
        await store.audit.sweep(2**40)
        assert not await store.audit.list()

    with Store(tmp_path) as store:
        asyncio.run(story(store))


def test_a_change_that_fails_leaves_no_row(tmp_path: Path) -> None:
    async def story(store: Store) -> None:
        def write(session: object) -> None:
            from coserve.serve.store.audit import note_action

            note_action(session, 1, "key.created", "key_1", "")  # type: ignore[arg-type]
            raise StateError("no")

        with pytest.raises(StateError):
            await store._database.write(write)
        assert not await store.audit.list()

    with Store(tmp_path) as store:
        asyncio.run(story(store))
