"""`coserve bench policies`: every strategy on every traffic, and what a user would do instead."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from coserve.errors import ConfigError
from coserve.workload.prompts import read_prompts
from coserve.workload.trace_formats import read_trace
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.mixes import TrainingSpec, encode_prompts, word_tokenizer
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.policies import instead, papers, switching
from coserve_benchmarks.policies.contest import OURS, PROMISED
from coserve_benchmarks.policies.fitted import RoundSettings
from coserve_benchmarks.policies.replay import ServerTestbed
from coserve_benchmarks.policies.rounds import ContestRunner
from coserve_benchmarks.policies.testbed import EngineTestbed, Testbed
from coserve_benchmarks.policies.traffic import poisson
from coserve_benchmarks.results import Bar
from coserve_benchmarks.timing import Ratio, ratio_of

TRACED: Final = ("azure", "azure-arrivals")
GROUPS: Final = (
    "switch", "report", "fineinfer", "flexllm", "poisson", "bursty", *TRACED, "tiers", "flex", "answers",
    "load", "instead", "instead-loads",
)  # fmt: skip
BARS: Final[Mapping[str, Bar | None]] = {
    "switch.seconds": Bar(0.052, at_most=True),
    **papers.BARS,
    "ours.dominated": Bar(0.0, at_most=True),
    "ours.best_lead": Bar(1.15),
    "ours.vs_two_processes": Bar(1.1),
    "ours.vs_two_processes[light]": None,
    "ours.vs_two_processes[heavy]": None,
}
_INSIDE: Final = ("switch", "instead", "instead-loads")  # with an engine only
_ENGINE, _SERVER = "an engine", "a server"
_SHAPE: Final = "255m"
_QUICK_SHAPE: Final = "19m"
_SECONDS: Final = 30.0
_QUICK_SECONDS: Final = 5.0
_AGAIN: Final = 4  # further rounds, unless quick, of those that one does not tell apart
_QUICK: Final = ("switch", "report", "fineinfer", "poisson", "tiers", "answers", "instead")
_NOTICED: Final = 1.02  # training more than this beyond ours, at our attainment or more, dominates it
_LONGEST: Final = 512  # tokens of a prompt that is read from a file


def run_policies(
    shape: str | None = None,
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
    trace: str | Path | None = None,
    prompts: str | Path | None = None,
    seconds: float | None = None,
    further: bool = False,
    server: bool = False,
) -> dict[str, Any]:
    """Measures some groups (all, by default; without a `trace` none that replays one).

    Workloads are replayed against one engine, or with `server` against a `coserve serve` for each round, over
    HTTP; groups that look into an engine are not there then. `prompts` is a CSV or JSONL with texts that
    requests begin with; `seconds` is how long requests arrive in each run. With `further` what `json_path`
    already has stays, but for the groups that are measured now. `shape` is by default small for `quick`, and
    otherwise large enough for weights to be what decoding reads. The dictionary is as
    `coserve_benchmarks.engine.run_engine`'s, with sections `workloads`, `sweeps` and `switch` for
    `policies.page`. Raises ConfigError or DataError, and ServerError where a server does not do what it
    should.
    """
    known = tuple(g for g in GROUPS if not (server and g in _INSIDE))
    usual = _QUICK if quick else tuple(g for g in GROUPS if trace is not None or g not in TRACED)
    groups = tuple(g for g in usual if g in known) if only is None else tuple(only)
    shape = shape or (_QUICK_SHAPE if quick else _SHAPE)
    against = _SERVER if server else _ENGINE
    earlier = _earlier(json_path, shape, against) if further else {}
    bench = begin(shape, quick, groups, known, json_path, BARS)
    vocabulary = bench.shape.vocabulary
    texts = (
        () if prompts is None else encode_prompts(read_prompts(prompts), word_tokenizer(vocabulary), _LONGEST)
    )
    rows = () if trace is None else read_trace(trace)
    length = seconds or (_QUICK_SECONDS if quick else _SECONDS)
    sizes = RoundSettings(length, vocabulary, rows, texts, again=0 if quick else _AGAIN)
    with _testbed(bench, server) as testbed:
        rounds = ContestRunner(testbed, sizes, bench)
        if earlier:
            bench.results.take_over(earlier)
            rounds.done.update(earlier.get("workloads", {}))
            rounds.sweeps.update(earlier.get("sweeps", {}))
            for name in ("workloads", "sweeps", "switch"):
                bench.results.section(name, earlier.get(name, {}))
        bench.results.section("ours", OURS)
        bench.results.section("against", against)
        run_groups(bench, groups, _runs(rounds))
        _compare(rounds)
    bench.results.save()
    return bench.results.as_dict()


@contextmanager
def _testbed(bench: Bench, server: bool) -> Iterator[Testbed]:
    if not server:
        yield EngineTestbed(bench)
        return
    with TemporaryDirectory(prefix="coserve-bench-") as folder:
        yield ServerTestbed(bench, Path(folder))


def _runs(rounds: ContestRunner) -> Mapping[str, Callable[[], object]]:
    return {
        "switch": partial(_switch, rounds),
        "report": partial(papers.report, rounds),
        "fineinfer": partial(papers.fineinfer, rounds),
        "flexllm": rounds.flexllm,
        "poisson": rounds.poisson,
        "bursty": rounds.bursty,
        "azure": rounds.azure,
        "azure-arrivals": rounds.azure_arrivals,
        "tiers": rounds.tiers,
        "flex": rounds.flex,
        "answers": rounds.answers,
        "load": partial(papers.load_sweep, rounds),
        "instead": partial(instead.compare, rounds),
        "instead-loads": partial(instead.compare_loads, rounds),
    }


def _switch(rounds: ContestRunner) -> None:
    training = TrainingSpec(batch=4, length=128)
    workload = poisson(replace(rounds.sizes.given(), seconds=1.0), rate=1.0, prompt=64, training=training)
    assert isinstance(rounds.testbed, EngineTestbed), "it looks into an engine"
    switching.measure(rounds.bench, rounds.testbed, workload, rounds=5)


def _earlier(path: str | Path | None, shape: str, against: str) -> dict[str, Any]:
    """Results of an earlier run, empty where there is none. Raises ConfigError for results of another
    kind."""
    if path is None or not Path(path).exists():
        return {}
    foreign = f"{path} holds no results of this bench to go on with"
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text())
        theirs, keys = found["shape"], found["bars"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(foreign) from error
    if not BARS.keys() & keys:
        raise ConfigError(foreign)
    if theirs != shape:
        raise ConfigError(f"{path} is about the shape {theirs}, not {shape}")
    if (other := found.get("against", _ENGINE)) != against:
        raise ConfigError(f"{path} is about {other}, not {against}")
    return found


def _compare(rounds: ContestRunner) -> None:
    """Ours against the best of the others on every workload: where it is beaten, and by how much it leads."""
    dominated: list[str] = []
    leads: dict[str, tuple[float, str]] = {}
    contests = {name: one for name, one in rounds.done.items() if not name.startswith(instead.INSTEAD)}
    for name, contest in contests.items():
        runs = {run: _judged(found) for run, found in contest["runs"].items()}
        ours, trained = runs.pop(OURS)
        for other, (kept, rate) in runs.items():
            if kept >= ours and rate > _NOTICED * trained:
                dominated.append(f"{name}: {other}, {rate:,.0f} tokens/s where ours trains {trained:,.0f}")
        if ours >= PROMISED:
            leads[name] = _lead(trained, runs)
    results = rounds.bench.results
    if contests:
        told = "; ".join(dominated) or "nobody with at least our attainment trains over 2 % more"
        results.row("ours.dominated", float(len(dominated)), note=told)
    counted = [name for name, (lead, _) in leads.items() if not math.isnan(lead)]
    if counted:
        best = max(counted, key=lambda name: leads[name][0])
        told = "; ".join(f"{name} {lead:.2f} over {other}" for name, (lead, other) in leads.items())
        lead, other = leads[best]
        found = _lead_by_rounds(contests[best]["runs"], other)
        told = f"on {best}; at 99 % attainment: {told}"
        if found is None:
            results.row("ours.best_lead", lead, note=told)
        else:
            results.ratio("ours.best_lead", replace(found, value=lead), told)


def _lead_by_rounds(runs: Mapping[str, Mapping[str, Any]], other: str) -> Ratio | None:
    """Training of ours over another's, by the rounds that both had; None where the results that a run goes on
    with do not have them."""
    rates = [runs[name].get("training_rounds") or () for name in (OURS, other)]
    if not all(rates) or not all(rates[1]):
        return None
    return ratio_of([ours / theirs for ours, theirs in zip(*rates, strict=False)])


def _judged(run: Mapping[str, Any]) -> tuple[float, float]:
    """A run's attainment by the first judge, and its fine-tuning tokens/s."""
    return next(iter(run["attainment"].values())), run["training"]


def _lead(trained: float, others: Mapping[str, tuple[float, float]]) -> tuple[float, str]:
    """Ours over the one that trains most of the others that keep 99 %; nan where none of those trains."""
    rates = {name: rate for name, (kept, rate) in others.items() if kept >= PROMISED}
    following = max(rates, key=rates.__getitem__, default="")
    if not following or not rates[following]:
        return math.nan, "nobody who trains"
    return trained / rates[following], following
