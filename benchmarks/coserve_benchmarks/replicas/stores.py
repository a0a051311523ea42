"""Row `store.postgres_over_sqlite`: what operations of the store take on either database."""

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

from coserve.serve.store.ids import new_id
from coserve.serve.store.records import File
from coserve.serve.store.store import Store
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.replicas.postgres import NOT_INSTALLED, postgres_server, programs
from coserve_benchmarks.timing import Ratio, ratio_of

_OPERATIONS: Final = 200  # of each kind in a round
_QUICK_OPERATIONS: Final = 20
_ROUNDS: Final = 5
_LOOKED_AT: Final = 100  # rows of a page


async def operate(store: Store, tenant: str, operations: int) -> float:
    """Seconds of so many additions, look-ups and pages of files, one after the other."""
    started = time.perf_counter()
    for _ in range(operations):
        file = File(new_id("file"), tenant, "data.jsonl", "fine-tune", 1, 1, ".jsonl")
        await store.files.add(file)
        await store.files.get(tenant, file.id)
        await store.files.page(tenant, None, _LOOKED_AT, False)
    return time.perf_counter() - started


def compared(rounds: int, slower: Callable[[], float], faster: Callable[[], float]) -> Ratio:
    """The first one's seconds over the second one's, in rounds that take turns."""
    return ratio_of([slower() / faster() for _ in range(rounds)])


def run(bench: Bench) -> None:
    """Measures stores on a SQLite file and on a PostgreSQL server of this machine, both durable. PostgreSQL
    is reached by a socket: over a network each operation takes the way there and back in addition."""
    if programs() is None:
        bench.results.note("store.postgres_over_sqlite", NOT_INSTALLED)
        return
    operations = _QUICK_OPERATIONS if bench.results.header["quick"] else _OPERATIONS
    with (
        tempfile.TemporaryDirectory(prefix="coserve-bench-") as folder,
        postgres_server(durable=True) as server,
        Store(Path(folder) / "sqlite") as sqlite,
        Store(Path(folder) / "postgres", database=server.database()) as postgres,
        asyncio.Runner() as runner,
    ):
        tenants, taken = dict[Store, str](), defaultdict[str, list[float]](list)
        for store in (sqlite, postgres):
            runner.run(store.tenants.create_key("bench"))
            tenants[store] = runner.run(store.tenants.list())[-1].id
            runner.run(operate(store, tenants[store], 1))

        def seconds(store: Store, name: str) -> float:
            taken[name].append(runner.run(operate(store, tenants[store], operations)))
            return taken[name][-1]

        ratio = compared(_ROUNDS, lambda: seconds(postgres, "postgres"), lambda: seconds(sqlite, "sqlite"))
    for name, found in taken.items():
        bench.results.figure(f"store.{name}", 3 * operations / median(found), "operations/s")
    note = f"seconds of {3 * operations} additions, look-ups and pages, one after the other"
    bench.results.ratio("store.postgres_over_sqlite", ratio, note)
