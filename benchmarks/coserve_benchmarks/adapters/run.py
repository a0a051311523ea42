"""`coserve bench adapters`: the whole table."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.adapters import decode, figure, swap, training
from coserve_benchmarks.adapters.sizes import AdapterSizes
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.results import Bar

GROUPS: Final = ("rank8", "mixed", "train", "jobs", "swap", "figure")
BARS: Final[Mapping[str, Bar | None]] = {
    **{f"rank8.decode.vs_single[{count}]": Bar(0.85) if count == 32 else None for count in (2, 4, 16, 32)},
    "rank8.decode.vs_base": Bar(0.75),
    "rank8.decode.vs_peft_mixed": Bar(5.0),
    **{f"mixed.decode.vs_single[{count}]": None for count in (2, 4, 16, 32)},
    "mixed.decode.vs_base": None,
    "mixed.decode.vs_floor": Bar(0.85),
    "mixed.decode.vs_peft_mixed": Bar(3.5),
    "train.vs_single[2]": None,
    "train.vs_single[16]": Bar(0.85),
    "train.vs_sequential": Bar(1.5),
    "train.vs_sequential_matched": None,
    "train.mixed[4]": None,
    "train.mixed[16]": Bar(1.3),
    "swap.others_p99_ratio": Bar(1.2, at_most=True),
}


def run_adapters(
    shape: str = "255m",
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
) -> dict[str, Any]:
    """Measures the rows of some groups (all, by default) and returns what `--json` writes.

    The dictionary is as `coserve_benchmarks.engine.run_engine`'s. Raises ConfigError for an unknown shape or
    group.
    """
    groups = GROUPS if only is None else tuple(only)
    bench = begin(shape, quick, groups, GROUPS, json_path, BARS)
    sizes = AdapterSizes.of(bench.settings, bench.shape, quick)
    runs = {
        "rank8": partial(decode.run, bench, sizes, "rank8"),
        "mixed": partial(decode.run, bench, sizes, "mixed"),
        "train": partial(training.run, bench, sizes),
        "jobs": partial(training.run_mixed, bench, sizes),
        "swap": partial(swap.run, bench, quick),
        "figure": partial(figure.run, bench, sizes, quick),
    }
    run_groups(bench, groups, runs)
    return bench.results.as_dict()
