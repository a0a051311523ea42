"""What a user would do instead, on the same weights: two processes, or one that stops serving to train."""

from dataclasses import replace
from typing import Final

import torch

from coserve.bench.policies import traffic
from coserve.bench.policies.contest import OURS, Contest, within
from coserve.bench.policies.making import Training
from coserve.bench.policies.rounds import Rounds
from coserve.bench.policies.without.onestops import OneProcess, best_turns
from coserve.bench.policies.without.trials import Tried
from coserve.bench.policies.without.twoprocess import TwoProcesses, best_split
from coserve.bench.timing import percentile
from coserve.bench.workloads import Workload
from coserve.core.request import SLO

TWO: Final = "two processes"
ONE: Final = "one process that stops"
_LOAD: Final = 0.15  # of what the engine answers: what transformers on half of the machine keeps up with
_TRIAL: Final = 0.5  # of a round's length: each setting
_ROUNDS: Final = 3


def compare(rounds: Rounds) -> Contest:
    """Both alternatives, and ours on the bound that two processes kept at the 99th percentile.

    So attainment is equal by construction, and fine-tuning is what is left to compare.
    """
    rate = _LOAD * rounds.capacity(64, 32)
    training = Training(batch=4, length=256)
    workload = traffic.poisson(rounds.sizes.given(), rate=rate, prompt=64, training=training)
    workload = replace(workload, name="instead", title="Poisson arrivals; what a user would do instead")
    shape, threads = rounds.bench.shape, torch.get_num_threads()
    trial = _TRIAL * rounds.sizes.seconds
    split, tried = best_split(shape, workload, threads, trial)
    _note(rounds, TWO, tried)
    ratios, shares = [], []
    peak = rounds.peak(workload)
    with TwoProcesses(shape, split) as two:
        for _ in range(_ROUNDS):
            theirs = two.run(workload)
            bound = percentile([answer.latency for answer in theirs.answers], 0.99)
            contest = Contest(
                workload, {"as theirs": f"answer {bound:.2f} s"}, {"as theirs": within(bound)}, peak
            )
            contest.add(TWO, theirs, f"the best of {len(tried)} settings: {split.describe()}")
            for policy in (OURS, "hybrid"):
                contest.add(policy, rounds.arena.run(policy, _bounded(workload, bound)))
            ratios.append(contest.training(OURS) / contest.training(TWO))
            shares.append(contest.attainment(OURS))
    turns, tried = best_turns(shape, workload, threads, trial)
    _note(rounds, ONE, tried)
    with OneProcess(shape, turns) as one:
        contest.add(ONE, one.run(workload), f"the best of {len(tried)} settings: {turns.describe()}")
    rounds.keep(contest)
    middle = sorted(range(_ROUNDS), key=ratios.__getitem__)[_ROUNDS // 2]
    told = (
        f"answers within the 99th percentile of two processes ({contest.bounds['as theirs']} at last); "
        f"ours kept it for {shares[middle]:.1%}"
    )
    rounds.bench.results.row("ours.vs_two_processes", ratios[middle], (min(ratios), max(ratios)), told)
    return contest


def _bounded(workload: Workload, bound: float) -> Workload:
    slo = SLO(end_to_end=bound)
    return replace(workload, requests=tuple(replace(request, slo=slo) for request in workload.requests))


def _note(rounds: Rounds, name: str, tried: dict[str, Tried]) -> None:
    text = "; ".join(
        f"{setting}: {found.training:,.0f} tokens/s trained, answers {found.p50:.2f} s (p99 {found.p99:.2f})"
        for setting, found in tried.items()
    )
    rounds.bench.results.note(f"{name}, settings tried", text)
