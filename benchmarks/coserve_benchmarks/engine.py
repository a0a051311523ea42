"""`coserve bench engine`: the whole table, against peers on the same weights, in one process."""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coserve.errors import ConfigError
from coserve_benchmarks import blocking, coserving, drafts, finetune, inference, metered, remote, stepping
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.results import BARS, RANKS_BARS, REMOTE_BARS

GROUPS = ("inference", "finetune", "blocking", "coserve", "step", "metered", "drafts")
REMOTE = "remote"  # the group of `--executor remote`
RANKS = "ranks"  # the group of `--tensor-parallel`


def run_engine(
    shape: str = "255m",
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
    plans: str | Path | None = None,
    executor: str = "local",
    compiled: bool = False,
    pythons: Sequence[str] = (),
    ranks: int = 1,
) -> dict[str, Any]:
    """Measures the rows of some groups (all, by default) and returns what `--json` writes.

    The dictionary has the table's keys at its top level, and sections `bars`, `met`, `spreads`, `figures`
    (absolute, with their floors), `notes` and `series` beside them. `json_path` is written after every row,
    so an interrupted run keeps what it has. `plans` receives the training that the co-serving run's plans
    held (`plans.watch_plans`). `quick` is for trying it out: fewer, shorter rounds, and on the tiny shape
    smaller ones. With an `executor` that is "remote", or with several `ranks`, its steps are measured
    instead, over those of a local one. Where `compiled`, peers are tried with torch.compile, too, if there is
    a C++ compiler. `pythons` are interpreters that may have llama.cpp or vLLM, which are left out where
    neither these nor this one has them. Raises ConfigError for an unknown shape, group or executor.
    """
    if executor not in ("local", REMOTE):
        raise ConfigError(f"--executor must be local or remote, not {executor!r}")
    if executor == REMOTE and ranks > 1:
        raise ConfigError("--executor does not go with --tensor-parallel: ranks are processes of their own")
    known, bars = ((REMOTE,), REMOTE_BARS) if executor == REMOTE else (GROUPS, BARS)
    if ranks > 1:
        known, bars = (RANKS,), RANKS_BARS
    groups = known if only is None else tuple(only)
    bench = begin(shape, quick, groups, known, json_path, bars, compiled, pythons)
    runs = {  # in this order: the last one's denominators are figures of the first two
        "inference": partial(inference.run, bench),
        "finetune": partial(finetune.run, bench),
        "blocking": partial(blocking.run, bench),
        "coserve": partial(coserving.run, bench, plans),
        "step": partial(stepping.run, bench),
        "metered": partial(metered.run, bench),
        "drafts": partial(drafts.run, bench),
        REMOTE: partial(remote.run, bench),
        RANKS: partial(remote.run, bench, ranks),
    }
    run_groups(bench, groups, runs)
    return bench.results.as_dict()
