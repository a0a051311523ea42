"""`coserve bench models`: every type of models, one after the other."""

import logging
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from coserve.core.checkout import measured_code
from coserve.errors import ConfigError
from coserve_benchmarks.models import shrunk
from coserve_benchmarks.models.page import cell, kind_of
from coserve_benchmarks.models.sweep import ANSWERS, TRAINING, Outcome, sweep
from coserve_benchmarks.results import Bar, Results

NAMES: Final = (
    *shrunk.NAMES,
    *shrunk.WITHOUT_RECURRENCE,
    *(n for n in shrunk.MULTIMODAL if n not in shrunk.NAMES),
)
# Of all types that transformers builds small, the share that answers and trains exactly; and the number of
# those that are neither exact nor refused.
BARS: Final[Mapping[str, Bar | None]] = {"exact_share": None, "faults": Bar(0, at_most=True)}


def run_models(only: Collection[str] | None = None, json_path: str | Path | None = None) -> dict[str, Any]:
    """Tries types (all, by default) and returns what `--json` writes. Raises ConfigError for a type that
    transformers does not know."""
    if unknown := set(only or ()) - set(NAMES):
        raise ConfigError(f"transformers has no language models of the type {sorted(unknown)[0]}")
    header = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "code": measured_code(),
        "date": _now(),
        "ended": None,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "tolerances": {"answers": ANSWERS, "training": TRAINING},
    }
    results, found = Results(header, json_path, BARS), list[Outcome]()
    with _quiet():
        for outcome in sweep(only or NAMES):
            found.append(outcome)
            kinds = Counter(map(kind_of, map(asdict, found)))
            built = len(found) - kinds["not built"]
            results.row("exact_share", kinds["exact"] / built if built else 0.0)
            results.row("faults", kinds["fault"])
            results.section("types", {one.name: asdict(one) for one in found})
            print(f"{outcome.name:28} {cell(asdict(outcome))[:150]}", flush=True)
    header["ended"] = _now()
    results.save()
    return results.as_dict()


def print_models(results: Mapping[str, Any], console: Console | None = None) -> None:
    """The numbers of types by what became of them, and the faults."""
    console = Console() if console is None else console
    kinds = Counter(map(kind_of, results["types"].values()))
    console.print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()), highlight=False)
    console.print(f"exact_share {results['exact_share']:.3f}", highlight=False)
    for name, one in results["types"].items():
        if one["fault"]:
            console.print(f"{name}: {one['fault']}", highlight=False, markup=False)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without warnings of the log and bars of transformers: there are hundreds."""
    from transformers.utils import logging as transformers_logging

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(before)
        transformers_logging.enable_progress_bar()
