"""Alternatives to coserve on the same weights: two processes, or one that stops serving to train."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import torch

from coserve.core.request import SLO
from coserve.simulate.intervals import percentile
from coserve.workload.requests import Workload
from coserve_benchmarks.mixes import TrainingSpec
from coserve_benchmarks.policies import traffic
from coserve_benchmarks.policies.contest import OURS, Contest, within
from coserve_benchmarks.policies.rounds import ContestRunner
from coserve_benchmarks.policies.without.onestops import OneProcess, best_turns
from coserve_benchmarks.policies.without.trials import TrialResult, beginning, frontier, measure
from coserve_benchmarks.policies.without.twoprocess import Split, TwoProcesses, try_splits
from coserve_benchmarks.timing import ratio_of

INSTEAD: Final = "instead"
TWO: Final = "two processes"
ONE: Final = "one process that stops"
# Requests, as shares of what the engine answers 16 at once. The first is what transformers on half of the
# machine keeps up with.
_LOAD: Final = 0.15
_FURTHER: Final = {"light": 0.05, "heavy": 0.3}
_TRIAL: Final = 0.5  # of a round's length: each setting
_ROUNDS: Final = 5
_THEIRS: Final = 0.99  # of two processes' requests are within their bound


def compare(rounds: ContestRunner) -> None:
    """Both alternatives, and ours on the bound that two processes kept at the 99th percentile.

    So attainment is equal by construction, and fine-tuning is what is left to compare. Each split of the
    machine has a bound and a rate of training of its own: the one that is compared is the one at whose bound
    ours is least ahead, and not the one that trains most, whose bound is the widest.
    """
    _row(rounds, "", _LOAD * rounds.capacity(64, 32))


def compare_loads(rounds: ContestRunner) -> None:
    """The same with fewer and with more requests."""
    capacity = rounds.capacity(64, 32)
    for name, load in _FURTHER.items():
        _row(rounds, name, load * capacity)


def _row(rounds: ContestRunner, name: str, rate: float) -> None:
    """At one load, called `name`."""
    contest, ratios, shares = _at(rounds, name, rate)
    middle = sorted(range(_ROUNDS), key=ratios.__getitem__)[_ROUNDS // 2]
    told = (
        f"{rate:.2f} requests a second; answers within the 99th percentile of two processes "
        f"({contest.bounds['as theirs']} at last); ours kept it for {shares[middle]:.1%}"
    )
    key = "ours.vs_two_processes" + (name and f"[{name}]")
    found = ratio_of(ratios)
    rounds.bench.results.ratio(key, found, told)
    points = [point for point in rounds.sweeps.get(INSTEAD, []) if point["load"] != name]
    for who, run in contest.runs.items():
        kept = contest.attainment(who)
        point = {"load": name, "rate": rate, "policy": who, "training": run["training"], "attainment": kept}
        points.append(point)
    rounds.sweep(INSTEAD, points)


def _at(rounds: ContestRunner, name: str, rate: float) -> tuple[Contest, list[float], list[float]]:
    """The last round of everybody; in all of them what ours trained over what two processes did, and the
    share of requests for which it kept their bound."""
    training = TrainingSpec(batch=4, length=256)
    workload = traffic.poisson(rounds.sizes.given(), rate=rate, prompt=64, training=training)
    where = name and f" ({name} load)"
    title = f"Poisson arrivals; what a user would do instead{where}"
    workload = replace(workload, name=INSTEAD + (name and f"-{name}"), title=title)
    shape, threads = rounds.bench.shape, torch.get_num_threads()
    trial = _TRIAL * rounds.sizes.seconds
    part = beginning(workload, trial)
    splits = try_splits(shape, part, threads)
    _note(rounds, TWO + where, {split.describe(): found for split, found in splits.items()})
    split = least_ahead(splits, lambda bound: measure(rounds.testbed.run(OURS, _bounded(part, bound))))
    ratios, shares = [], []
    peak = rounds.peak(workload)
    with TwoProcesses(shape, split) as two:
        for _ in range(_ROUNDS):
            theirs = two.run(workload)
            bound = percentile([answer.latency for answer in theirs.answers], 0.99)
            contest = Contest(
                workload, {"as theirs": f"answer {bound:.2f} s"}, {"as theirs": within(bound)}, peak
            )
            contest.add(TWO, theirs, f"the best of {len(splits)} settings: {split.describe()}")
            for policy in (OURS, "hybrid"):
                contest.add(policy, rounds.testbed.run(policy, _bounded(workload, bound)))
            ratios.append(contest.training(OURS) / contest.training(TWO))
            shares.append(contest.attainment(OURS))
    turns, tried = best_turns(shape, workload, threads, trial)
    _note(rounds, ONE + where, tried)
    with OneProcess(shape, turns) as one:
        contest.add(ONE, one.run(workload), f"the best of {len(tried)} settings: {turns.describe()}")
    contest.peak = max(peak, rounds.peak(workload, times=2.0))
    rounds.keep(contest)
    return contest, ratios, shares


def least_ahead(tried: Mapping[Split, TrialResult], ours: Callable[[float], TrialResult]) -> Split:
    """The split at whose 99th percentile ours, run with that bound, trains least in proportion; ours counts
    as training nothing where it keeps the bound for fewer requests."""

    def ahead(split: Split) -> float:
        theirs, found = tried[split], ours(tried[split].p99)
        return found.training / max(theirs.training, 1e-9) if found.attainment >= _THEIRS else 0.0

    return min(frontier(tried), key=ahead)


def _bounded(workload: Workload, bound: float) -> Workload:
    slo = SLO(end_to_end=bound)
    return replace(workload, requests=tuple(replace(request, slo=slo) for request in workload.requests))


def _note(rounds: ContestRunner, name: str, tried: Mapping[str, TrialResult]) -> None:
    text = "; ".join(
        f"{setting}: {found.training:,.0f} tokens/s trained, answers {found.p50:.2f} s (p99 {found.p99:.2f})"
        for setting, found in tried.items()
    )
    rounds.bench.results.note(f"{name}, settings tried", text)
