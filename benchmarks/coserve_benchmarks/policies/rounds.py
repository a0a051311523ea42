"""Rounds of `coserve bench policies` in real time: every policy on each workload."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from coserve.workload.requests import Workload
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.policies.contest import ISOLATED, OURS, Contest, Judge
from coserve_benchmarks.policies.fitted import FittedTraffic

_PEAK_SHARE: Final = 0.3  # of a round's length: what training alone is watched for


@dataclass(slots=True)
class ContestRunner(FittedTraffic):
    """Runs contests in one arena. `done` are finished ones, as JSON has them; `sweeps` are runs over one
    quantity."""

    bench: Bench
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    sweeps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def contest(
        self,
        workload: Workload,
        policies: Sequence[str],
        judges: dict[str, Judge],
        bounds: dict[str, str],
        named: Mapping[str, str] = MappingProxyType({}),
        latency_bounds: Mapping[str, float] = MappingProxyType({}),
        compared: Collection[str] = (),
    ) -> Contest:
        """Runs every policy on a workload, and isolation where there is one. Those close to ours and those
        `compared` with one another run again, in turn. `named` are policies with options, by a short name."""
        peak = self.peak(workload)
        contest = Contest(workload, bounds, judges, peak, latency_bounds)
        everybody = {**named, **{policy: policy for policy in policies}, ISOLATED: ISOLATED}
        judge = next(iter(judges.values()))

        def run(names: Iterable[str]) -> None:
            for name in names:
                policy = everybody[name]
                if name != ISOLATED:
                    contest.add(name, self.testbed.run(policy, workload), "" if name == policy else policy)
                elif apart := self.testbed.isolated(workload, judge):
                    contest.add(name, *apart)

        run(everybody)
        close = {name for name in contest.runs if contest.is_close(name)} if OURS in everybody else set()
        chosen = (close if len(close) > 1 else set()) | set(compared)
        for _ in range(self.sizes.again if chosen else 0):
            run(name for name in everybody if name in chosen)
        contest.peak = max(peak, self.peak(workload, times=2.0))
        self.keep(contest)
        return contest

    def peak(self, workload: Workload, times: float = 1.0) -> float:
        """Fine-tuning rate of the workload's jobs without its requests, tokens/s, watched `times` as long."""
        return self.testbed.peak(workload, times * _PEAK_SHARE * self.sizes.seconds)

    def keep(self, contest: Contest) -> None:
        """Writes a finished contest into the results."""
        self.done[contest.workload.name] = contest.as_dict()
        self.bench.results.section("workloads", self.done)

    def sweep(self, name: str, points: list[dict[str, Any]]) -> None:
        """Writes a sweep's points into the results."""
        self.sweeps[name] = points
        self.bench.results.section("sweeps", self.sweeps)
