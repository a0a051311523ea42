"""`coserve bench engine`: the whole table, against peers on the same weights, in one process."""

import shlex
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from coserve.bench import blocking, coserving, finetune, inference
from coserve.bench.machine import measure_machine
from coserve.bench.ours import Bench
from coserve.bench.results import Results
from coserve.bench.settings import settings_for
from coserve.bench.shapes import shape_named
from coserve.errors import ConfigError

GROUPS = ("inference", "finetune", "blocking", "coserve")


def run_engine(
    shape: str = "255m",
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
    plans: str | Path | None = None,
) -> dict[str, Any]:
    """Measures the rows of some groups (all, by default) and returns what `--json` writes.

    The dictionary has the table's keys at its top level, and sections `bars`, `met`, `spreads`, `figures`
    (absolute, with their floors), `notes` and `series` beside them. `json_path` is written after every row,
    so an interrupted run keeps what it has. `plans` receives the training that the co-serving run's plans
    held (`coserve.bench.plans`). `quick` is for trying it out: fewer, shorter rounds, and on the tiny shape
    smaller ones. Raises ConfigError for an unknown shape or group.
    """
    groups = GROUPS if only is None else tuple(only)
    if unknown := set(groups) - set(GROUPS):
        raise ConfigError(f"there is no group {sorted(unknown)} in the bench; there are {', '.join(GROUPS)}")
    chosen, settings = shape_named(shape), settings_for(shape, quick)
    machine = measure_machine(quick=quick and shape == "tiny")
    header = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "shape": shape,
        "parameters": chosen.parameters,
        "quick": quick,
        "groups": list(groups),
        "date": machine.date,
        "machine": machine.as_dict(),
    }
    bench = Bench(chosen, settings, machine, Results(header, json_path))
    runs: dict[str, Callable[[], None]] = {
        "inference": partial(inference.run, bench),
        "finetune": partial(finetune.run, bench),
        "blocking": partial(blocking.run, bench),
        "coserve": partial(coserving.run, bench, plans),
    }
    for group in GROUPS:  # in this order: the last one's denominators are figures of the first two
        if group in groups:
            started = time.perf_counter()
            runs[group]()
            bench.results.figure(f"bench.{group}", time.perf_counter() - started, "seconds it took")
            bench.results.save()
    return bench.results.as_dict()
