"""Contests of policies on one workload: attainment of bounds, and fine-tuning meanwhile."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

import numpy as np
import torch

from coserve.core.request import SLO
from coserve.simulate.intervals import percentile
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve.workload.requests import Workload
from coserve_benchmarks.intervals import interval

OURS: Final = "adaptive"
ISOLATED: Final = "isolated"
PROMISED: Final = 0.99  # share of requests within their bounds
_CLOSE: Final = (0.1, 0.3)  # in attainment, and in fine-tuning, relative

Judge = Callable[[AnswerTimes], bool]


@dataclass(slots=True)
class Contest:
    """A workload and the rounds of all contestants on it. `judges` test bounds, by their labels; the first
    one counts where one must. `peak` is the machine's fine-tuning rate alone, tokens/s, at its best so far.

    For a contestant with several rounds `runs` has the median one, by fine-tuning, with the mean attainment.
    """

    workload: Workload
    bounds: Mapping[str, str]
    judges: Mapping[str, Judge]
    peak: float
    latency_bounds: Mapping[str, float] = field(default_factory=dict)  # on whole answers, seconds
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    _rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, name: str, load: LoadResult, note: str = "") -> dict[str, Any]:
        """Adds a round."""
        found = summary(load, self.workload, self.judges, note)
        self._rounds.setdefault(name, []).append(found)
        self.runs[name] = _middle(self._rounds[name])
        kept = ", ".join(f"{share:.1%} {label}" for label, share in found["attainment"].items())
        print(
            f"{self.workload.name}: {name}: {kept}; {found['training']:,.0f} fine-tuning tokens/s",
            file=sys.stderr,
        )
        return found

    def is_close(self, name: str) -> bool:
        """Tells whether this contestant is too close to ours for one round to decide: shared machines vary
        from minute to minute."""
        attained = self.attainment(name) - self.attainment(OURS)
        least, most = sorted((self.training(name), self.training(OURS)))
        return abs(attained) <= _CLOSE[0] and most <= (1 + _CLOSE[1]) * least

    def attainment(self, name: str) -> float:
        """Share of the requests that pass the first judge."""
        share: float = next(iter(self.runs[name]["attainment"].values()))
        return share

    def training(self, name: str) -> float:
        """Fine-tuning tokens/s."""
        rate: float = self.runs[name]["training"]
        return rate

    @property
    def beyond_peak(self) -> list[str]:
        """Contestants that trained more than the peak, which is wrong then."""
        return [name for name, run in self.runs.items() if run["training"] > self.peak]

    def as_dict(self) -> dict[str, Any]:
        """The contest for JSON and for the page. Of a contestant beyond the peak no share of it is told."""
        wrong = self.beyond_peak
        runs = {
            name: {**run, "training_share": None if name in wrong else run["training"] / max(self.peak, 1e-9)}
            for name, run in self.runs.items()
        }
        for name in wrong:
            said = "it trained more than the peak that was measured: the peak is wrong"
            runs[name]["note"] = "; ".join(filter(None, (runs[name].get("note", ""), said)))
        return {
            "title": self.workload.title,
            "scale": self.workload.scale,
            "seconds": self.workload.seconds,
            "bounds": dict(self.bounds),
            "latency_bounds": dict(self.latency_bounds),
            "peak": self.peak,
            "runs": runs,
        }


def own_bounds(answer: AnswerTimes) -> bool:
    """Tells whether an answer kept the bounds that its request stated."""
    return answer.keeps(answer.slo)


def within(seconds: float) -> Judge:
    """A judge that tells whether an answer was complete within `seconds`."""
    return lambda answer: answer.keeps(SLO(end_to_end=seconds))


def bounds_deferral(workload: Workload) -> bool:
    """Tells whether any request bounds its delay by training."""
    return any(request.slo.deferral is not None for request in workload.requests)


def charge_deferral(load: LoadResult, undisturbed: LoadResult) -> None:
    """Sets the delay by training where the engine does not report it: the difference in latency to
    `undisturbed`, a load of the same requests on the whole machine without training."""
    for answer, other in zip(load.answers, undisturbed.answers, strict=True):
        if answer.tokens and other.tokens:
            answer.deferred = max(answer.latency - other.latency, 0.0)


def attained(load: LoadResult, workload: Workload, judge: Judge) -> float:
    """Share of a workload's requests whose answers pass a judge."""
    return sum(map(judge, load.answers)) / max(1, len(workload.requests))


def summary(load: LoadResult, workload: Workload, judges: Mapping[str, Judge], note: str) -> dict[str, Any]:
    """All figures of a round."""
    answered = [answer for answer in load.answers if answer.tokens]
    latencies = sorted(answer.latency for answer in answered)
    wall = max(load.finished_at - load.started, load.seconds)  # training goes on after the last answer
    losses = load.losses
    few = max(1, len(losses) // 10)
    return {
        "latency": _spread(latencies),
        "first_token": _spread([answer.first_token for answer in answered]),
        "between": _spread([gap for answer in answered for gap in answer.gaps]),
        "attainment": {label: attained(load, workload, judge) for label, judge in judges.items()},
        "training": load.overall_training_rate(),
        "loss": [sum(losses[:few]) / few, sum(losses[-few:]) / few] if losses else None,
        "processor": load.processor / wall / torch.get_num_threads(),
        "requests": len(workload.requests),
        "unanswered": len(workload.requests) - len(answered),
        "latencies": [round(seconds, 4) for seconds in latencies],
        "flow": _flow(load, workload),
        "note": note,
    }


def _middle(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summary of several rounds: the median one by fine-tuning, with the mean attainment."""
    ordered = sorted(rounds, key=itemgetter("training"))
    labels = ordered[0]["attainment"]
    attained = {label: sum(one["attainment"][label] for one in rounds) / len(rounds) for label in labels}
    rates = [one["training"] for one in rounds]
    middle = ordered[(len(ordered) - 1) // 2]
    return {
        **middle,
        "attainment": attained,
        "rounds": len(rounds),
        "training_rounds": rates,
        "training_spread": list(interval(np.median, rates)),
    }


def _flow(load: LoadResult, workload: Workload) -> list[list[float]]:
    """(second, output tokens/s, fine-tuning tokens/s, arrivals/s) of each second."""
    arrivals = [0] * max(1, int(workload.seconds))
    for request in workload.requests:
        arrivals[min(int(request.at), len(arrivals) - 1)] += 1
    return [[*row, float(count)] for row, count in zip(load.per_second(), arrivals, strict=True)]


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "mean": sum(values) / len(values),
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
    }
