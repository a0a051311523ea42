"""Rows `slowdown.*`: what training costs answers that state no other bound, at half of the capacity.

`slowdown.kept` is the share of answers whose own slowdown is within the bound: their measured times over the
same less what training took of them, by the cost model's account of every step they waited for. The other
rows compare with the same arrivals without training, round by round. That is more: answers that take longer
overlap with more others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Final

from coserve.core.request import SLO
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve.workload.requests import TimedRequest, Workload, poisson_requests
from coserve_benchmarks.intervals import share_interval
from coserve_benchmarks.results import Results
from coserve_benchmarks.settings import Settings
from coserve_benchmarks.timing import OF_SHARE, ratio_of

BOUND: Final = 1.5  # of `coserve serve` by default


@dataclass(frozen=True, slots=True)
class Pair:
    """The same arrivals without training and beside it; answers are in the order of arrival."""

    alone: LoadResult
    beside: LoadResult


def requests_of(settings: Settings, rate: float, vocabulary: int, turn: int) -> list[TimedRequest]:
    """The requests of a round, `rate` a second, each with the bound; others in every round."""
    slo = SLO(slowdown=BOUND)
    return poisson_requests(
        rate,
        settings.slowdown_seconds,
        settings.prompt,
        settings.answer,
        vocabulary,
        settings.seed + turn,
        slo,
    )


def measure(
    settings: Settings,
    rate: float,
    vocabulary: int,
    alone: Callable[[Workload], LoadResult],
    beside: Callable[[Workload], LoadResult],
) -> list[Pair]:
    """Rounds in which the same arrivals are served without training, then beside it."""
    rounds = []
    for turn in range(settings.slowdown_rounds):
        requests = tuple(requests_of(settings, rate, vocabulary, turn))
        load = Workload("half", "requests at half of the capacity", settings.slowdown_seconds, requests, ())
        rounds.append(Pair(alone(load), beside(load)))
    return rounds


def write_rows(results: Results, rounds: Sequence[Pair]) -> None:
    """The rows of some rounds; ratios are medians of the rounds' ratios of medians over answers."""
    slowdowns = [slowdown_of(answer) for pair in rounds for answer in pair.beside.answers]
    kept = sum(slowdown <= BOUND for slowdown in slowdowns) / len(slowdowns)
    note = f"of {len(slowdowns)} answers; the largest slowdown of one is {max(slowdowns):.2f}"
    results.row("slowdown.kept", kept, share_interval(kept, len(slowdowns)), note, OF_SHARE)
    for name, measured in (("first", _first), ("between", _between)):
        ratio = ratio_of([_median(pair.beside, measured) / _median(pair.alone, measured) for pair in rounds])
        results.ratio(f"slowdown.{name}", ratio)
    replayed = [
        max(_first(answer) / _first(twin), _between(answer) / _between(twin))
        for pair in rounds
        for answer, twin in zip(pair.beside.answers, pair.alone.answers, strict=True)
    ]
    within = sum(ratio <= BOUND for ratio in replayed) / len(replayed)
    results.figure("slowdown.kept_replayed", within, "of answers, each over itself without training")
    trained = mean(pair.beside.training_rate() for pair in rounds)
    results.figure("slowdown.training", trained, "tokens/s")


def slowdown_of(answer: AnswerTimes) -> float:
    """The larger slowdown by training, of an answer's time to its first token and of that since then."""
    since = answer.tokens[-1] - answer.tokens[0]
    spans = (
        (answer.first_token, answer.deferred_first),
        (since, answer.deferred - answer.deferred_first),
    )
    return max((span / max(span - taken, 1e-9) for span, taken in spans if taken > 0.0), default=1.0)


def _first(answer: AnswerTimes) -> float:
    return answer.first_token


def _between(answer: AnswerTimes) -> float:
    return mean(answer.gaps)


def _median(load: LoadResult, measured: Callable[[AnswerTimes], float]) -> float:
    return median(measured(answer) for answer in load.answers)
