"""Rows `coserve.*` and `slowdown.*`: requests at half of the inference capacity while jobs train, against
time-slicing and against no training.

Requests have the shape of the first row (256 tokens in, 32 out on the large shape), and the jobs that of
the third: only then do a share of the first row's rate and a share of the third's add up to something.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coserve.core.request import SLO
from coserve.engine.engine import Engine
from coserve.simulate.intervals import percentile
from coserve.simulate.replay import LoadResult
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import Workload, poisson_requests
from coserve_benchmarks import finetune, inference, slowdown
from coserve_benchmarks.drive import serve
from coserve_benchmarks.intervals import interval, ratio_of_means, share_interval
from coserve_benchmarks.ours import Bench, make_engine, start_training, warm_training
from coserve_benchmarks.plans import RecordedStep, record_plans, save_plans
from coserve_benchmarks.timing import OF_SECONDS, OF_SHARE

_WANTED = 0.99  # attainment that time-slicing has to reach, where ours does
_LOAD = 0.5  # of the capacity
_SLACK = 2.0  # bounds over what requests have without training
_POINTS = 1000  # of a curve; a fast machine has six thousand gaps between tokens
_ONLY_WHEN_IDLE = 1_000_000  # finished requests between two micro-batches: never reached


@dataclass(frozen=True, slots=True)
class Slicing:
    """Time-slicing as it was run: `n` finished requests buy one mini-batch of `examples` examples."""

    n: int
    examples: int

    def describe(self) -> str:
        when = "only when idle" if self.n == _ONLY_WHEN_IDLE else f"n={self.n}"
        return f"{when}, {self.examples} examples at once"


@dataclass(frozen=True, slots=True)
class _Scored:
    """A run of some policy on the common workload."""

    name: str
    attainment: float
    efficiency: float
    load: LoadResult


@dataclass(frozen=True, slots=True)
class _Terms:
    """Terms of comparison for all policies: requests a second and their bounds, and the machine's rates for
    each kind of work alone (`capacity` in output tokens/s, `peak` in fine-tuning tokens/s)."""

    rate: float
    slo: SLO
    capacity: float
    peak: float

    def efficiency(self, load: LoadResult, begin: float = 0.0, end: float = 1.0) -> float:
        """Sum of both kinds of work between two parts of the load's time, each as a share of its rate
        alone."""
        return load.output_rate(begin, end) / self.capacity + load.training_rate(begin, end) / self.peak

    def by_second(self, load: LoadResult) -> list[float]:
        """Efficiency of each second of the load, whose mean is that of all of it."""
        parts = max(1, round(load.seconds))
        return [self.efficiency(load, part / parts, (part + 1) / parts) for part in range(parts)]

    def score(self, name: str, load: LoadResult) -> _Scored:
        """Score of a policy under that load."""
        return _Scored(name, load.attainment(self.slo), self.efficiency(load), load)


def run(bench: Bench, plans: str | Path | None = None) -> None:
    """Inference alone, then both at once, then time-slicing at its best on the same arrivals."""
    capacity, peak = inference.capacity(bench), finetune.peak(bench)
    rate = _LOAD * capacity / bench.settings.answer
    engine = make_engine(bench)
    alone = _serve(bench, engine, rate)
    terms = _Terms(rate, _bounds(bench, alone), capacity, peak)
    ours, fused_share, steps = _ours(bench, engine, terms)
    rounds = _slowdown_rounds(bench, engine, terms)
    del engine
    if plans is not None:
        save_plans(steps, plans)
    _note(bench, alone, ours.load, terms)
    results = bench.results
    kept = share_interval(ours.attainment, len(ours.load.answers))
    results.row("coserve.slo_attainment", ours.attainment, kept, spread_is=OF_SHARE)
    note = f"of {capacity:.1f} output tokens/s and {peak:.1f} fine-tuning tokens/s"
    seconds = interval(np.mean, terms.by_second(ours.load))
    results.row("coserve.efficiency", ours.efficiency, seconds, note, OF_SECONDS)
    results.row("coserve.fused_share", fused_share, note="of the steps with inference while training waited")
    slowdown.write_rows(results, rounds)
    _time_slicing_row(bench, terms, ours, terms.score("no training at all", alone))


def _slowdown_rounds(bench: Bench, engine: Engine, terms: _Terms) -> list[slowdown.Pair]:
    """The same arrivals without jobs and beside them, in turn, on the engine that trains already."""

    def beside(load: Workload) -> LoadResult:
        _start_jobs(bench, engine, bench.settings.batch)
        return serve(engine, load)

    def alone(load: Workload) -> LoadResult:
        for job in [*engine.jobs.values()]:
            job.cancel()
        return serve(engine, load)

    return slowdown.measure(bench.settings, terms.rate, bench.shape.vocabulary, alone, beside)


def _serve(bench: Bench, engine: Engine, rate: float, slo: SLO = SLO()) -> LoadResult:
    """Serves the workload: the same arrivals and prompts for all policies."""
    settings = bench.settings
    requests = poisson_requests(
        rate, settings.seconds, settings.prompt, settings.answer, bench.shape.vocabulary, settings.seed, slo
    )
    title = "requests at half of the capacity"
    return serve(engine, Workload("half", title, settings.seconds, tuple(requests), ()))


def _bounds(bench: Bench, alone: LoadResult) -> SLO:
    """Bounds: twice the 99th percentile of the same load without training, between tokens as the bar says,
    and for the first token by the same rule, so that queueing is bounded as strictly."""
    between, first = percentile(alone.gaps, 0.99), percentile(alone.first_tokens, 0.99)
    bench.results.note(
        "coserve.slo",
        f"first token within {_SLACK * first:.3f} s and {_SLACK * between:.3f} s between tokens: twice the "
        "99th percentile of the same arrivals without training",
    )
    return SLO(first_token=_SLACK * first, between_tokens=_SLACK * between)


def _ours(bench: Bench, engine: Engine, terms: _Terms) -> tuple[_Scored, float, list[RecordedStep]]:
    """The default policy, on the engine that served alone: (score, share of fused steps, its plans)."""
    _start_jobs(bench, engine, bench.settings.batch)
    stats = engine.scheduler.stats
    fused, possible = stats.fused_steps, stats.fused_possible
    with record_plans(engine) as steps:
        load = _serve(bench, engine, terms.rate, terms.slo)
    share = (stats.fused_steps - fused) / max(1, stats.fused_possible - possible)
    return terms.score("coserve", load), share, steps


def _time_slicing_row(bench: Bench, terms: _Terms, ours: _Scored, idle: _Scored) -> None:
    """Rows with the ratio of efficiencies: ours over the best time-slicing.

    For `coserve.vs_time_slicing` the most efficient of the settings tried counts that reaches our attainment
    (or the bar, if ours is above it). Training less and less ends with not training at all, which is a
    setting too: where nothing else reaches it, that one is the peer, and the row says so. The peer of
    `coserve.vs_time_slicing_training` trains in any case: the most efficient of those that reach it, or where
    none does, the one that comes closest.
    """
    tried = [_sliced(bench, slicing, terms) for slicing in _slicings(bench)]
    wanted = min(ours.attainment, _WANTED)
    good = [found for found in tried if found.attainment >= wanted]
    peer = max([idle, *good], key=lambda found: found.efficiency)
    trains = max(
        good or tried, key=lambda found: (found.efficiency if good else found.attainment, found.efficiency)
    )
    for found in tried:
        bench.results.figure(f"coserve.sliced_attainment ({found.name})", found.attainment, "of requests")
        bench.results.figure(f"coserve.sliced_efficiency ({found.name})", found.efficiency, "of capacity")
    for key, found in (("coserve.vs_time_slicing", peer), ("coserve.vs_time_slicing_training", trains)):
        ratio = ours.efficiency / found.efficiency
        both = [terms.by_second(scored.load) for scored in (ours, found)]
        spread = interval(ratio_of_means, *both, paired=True)
        bench.results.row(key, ratio, spread, _said_of_peer(found, wanted, ours), OF_SECONDS)


def _said_of_peer(peer: _Scored, wanted: float, ours: _Scored) -> str:
    """Sentence about the time-slicing that ours is compared with."""
    does = (
        f"trains {peer.load.training_rate():,.0f} tokens/s" if peer.load.trained else "trains nothing at all"
    )
    reaches = "reaches" if peer.attainment >= wanted else "does not reach"
    return (
        f"the peer is time-slicing with: {peer.name}; it {does}; its attainment of {peer.attainment:.3f} "
        f"{reaches} the {wanted:.3f} that were asked of it (ours: {ours.attainment:.3f}); its efficiency is "
        f"{peer.efficiency:.3f} (ours: {ours.efficiency:.3f})"
    )


def _slicings(bench: Bench) -> list[Slicing]:
    """Whole mini-batches often, and only while nobody is there; then single examples, which make the
    shortest slices that whole sequences allow. (A slice that somebody's answer waits for breaks its bound
    whenever it comes, so larger `n` differ little from never.)"""
    whole = bench.settings.batch
    return [Slicing(8, whole), Slicing(_ONLY_WHEN_IDLE, whole), Slicing(_ONLY_WHEN_IDLE, 1)]


def _sliced(bench: Bench, slicing: Slicing, terms: _Terms) -> _Scored:
    engine = make_engine(bench, policy="temporal", policy_options={"n": slicing.n, "grain": "batch"})
    _start_jobs(bench, engine, slicing.examples)
    return terms.score(slicing.describe(), _serve(bench, engine, terms.rate, terms.slo))


def _start_jobs(bench: Bench, engine: Engine, examples: int) -> None:
    """Jobs that train throughout, past their first step; a mini-batch holds so many examples."""
    names = [f"adapter-{index + 1}" for index in range(bench.settings.jobs)]
    jobs = [start_training(engine, bench, name, SavePolicy.EVERYTHING, batch=examples) for name in names]
    warm_training(engine, jobs)


def _drawn(seconds: Sequence[float]) -> list[float]:
    """Points of a cumulative curve: the seconds in order, or so many of their quantiles."""
    if len(seconds) > _POINTS:
        seconds = np.quantile(seconds, np.linspace(0, 1, _POINTS)).tolist()
    return [round(one, 5) for one in sorted(seconds)]


def _note(bench: Bench, alone: LoadResult, together: LoadResult, terms: _Terms) -> None:
    """Absolute figures with and without training, and the points to draw them from."""
    results = bench.results
    for name, load in (("alone", alone), ("together", together)):
        gaps, first = load.gaps, load.first_tokens
        results.figure(f"coserve.{name}_output", load.output_rate(), "output tokens/s")
        for share, label in ((0.5, "p50"), (0.99, "p99")):
            results.figure(f"coserve.{name}_between_{label}", percentile(gaps, share), "seconds")
            results.figure(f"coserve.{name}_first_{label}", percentile(first, share), "seconds")
        results.series(f"coserve.{name}_gaps", _drawn(gaps))
        results.series(f"coserve.{name}_throughput", load.per_second())
    results.figure("coserve.together_training", together.training_rate(), "tokens/s")
    for name, share, unit in (
        ("inference", together.output_rate() / terms.capacity, "of capacity"),
        ("training", together.training_rate() / terms.peak, "of peak"),
    ):
        results.figure(f"coserve.{name}_share", share, unit, floor=lambda: 1.0)
    results.figure("coserve.requests", len(together.answers), "requests")
    assert terms.slo.between_tokens is not None and terms.slo.first_token is not None
    results.figure("coserve.slo_between_tokens", terms.slo.between_tokens, "seconds")
    results.figure("coserve.slo_first_token", terms.slo.first_token, "seconds")
