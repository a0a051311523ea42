"""Groups of `coserve bench policies`: a workload each, fitted to the machine, and every policy on it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType
from typing import Any, Final

from coserve.core.request import SLO
from coserve.workload.mixes import ServedAdapters, WorkloadSettings, describe_bounds
from coserve.workload.requests import Tokens, Workload
from coserve.workload.traces import TraceRow
from coserve_benchmarks.drive import LoadResult
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.policies import traffic
from coserve_benchmarks.policies.contest import ISOLATED, OURS, Contest, Judge, own_bounds
from coserve_benchmarks.policies.testbed import Testbed
from coserve_benchmarks.timing import percentile

EVERYWHERE: Final = (
    "spatial",
    "idle-only",
    "temporal:8,grain=batch",
    "continuous",
    "hybrid",
    OURS,
)
_ROOM: Final = 1.5  # bounds over what requests take without training, where a workload's source has none
SOME: Final = ServedAdapters()  # requests ask for the base: what adapters cost is not the question here
_FEW: Final = ServedAdapters(count=2, rank=8, exponent=1.0)
_PEAK_SHARE: Final = 0.3  # of a round's length: what training alone is watched for
_SHARE: Final = 0.12  # of the requests that the machine answers 16 at once; few at once take much more of it
_MOSTLY_FLEX: Final = (0.1, 0.3, 0.6)  # of the requests: priority, default, flex
_PATIENT: Final = 1 / 3  # of a round's length: what flex requests among mostly such ones can be deferred by
_OWN: Final = "own bounds"


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """Length and contents of rounds."""

    seconds: float
    vocabulary: int
    trace: Sequence[TraceRow] = ()
    prompts: tuple[Tokens, ...] = ()
    seed: int = 0
    again: int = 0  # further rounds of those that one round does not tell apart

    def given(self, slo: SLO = SLO()) -> WorkloadSettings:
        """Settings for the workloads of `traffic`."""
        return WorkloadSettings(self.vocabulary, self.seconds, slo, self.seed, self.prompts)


@dataclass(slots=True)
class ContestRunner:
    """Runs contests in one arena. `done` are finished ones, as JSON has them; `sweeps` are runs over one
    quantity."""

    bench: Bench
    testbed: Testbed
    sizes: RoundSettings
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

    def own(self, workload: Workload, *more: str) -> Contest:
        """A contest on the bounds that the requests state."""
        stated = ", ".join(sorted({describe_bounds(request.slo) for request in workload.requests}))
        return self.contest(workload, (*EVERYWHERE, *more), {_OWN: own_bounds}, {_OWN: stated})

    # General traffic

    def flexllm(self) -> Contest:
        """FlexLLM's lengths, with bounds on the first token and between tokens."""
        rate = _SHARE * self.capacity(256, 64)
        return self._bounded(lambda given: traffic.flexllm(given, rate=rate, adapters=SOME))

    def poisson(self) -> Contest:
        """Poisson arrivals: independent users."""
        rate = _SHARE * self.capacity(128, 32)
        return self._bounded(lambda given: traffic.poisson(given, rate=rate, adapters=SOME))

    def bursty(self) -> Contest:
        """Bursts: users that come together."""
        rate = _SHARE * self.capacity(128, 32)
        return self._bounded(lambda given: traffic.bursty(given, rate=rate, adapters=SOME))

    def azure(self) -> Contest:
        """Recorded arrivals and lengths."""
        rate = _SHARE * self.capacity(128, 32)
        trace = self.sizes.trace
        return self._bounded(
            lambda given: traffic.azure(
                given, trace, rate=rate, longest_prompt=512, longest_answer=64, adapters=SOME
            )
        )

    def azure_arrivals(self) -> Contest:
        """Recorded arrivals, lengths of FlexLLM's case study."""
        rate = _SHARE * self.capacity(64, 32)
        trace = self.sizes.trace
        return self._bounded(lambda given: traffic.azure_arrivals(given, trace, rate=rate))

    def tiers(self) -> Contest:
        """Our own service tiers, with two jobs of different weight."""
        workload = self._tiers(self.sizes.given(), traffic.SHARES, deferral=3.0)
        return self.own(workload, "enhanced-temporal:16,0.5", "deferred:0.5", "deferred:0.5,together=1")

    def flex(self) -> Contest:
        """Mostly patient requests, as in batch tiers; rounds are twice as long."""
        given = replace(self.sizes.given(), seconds=2 * self.sizes.seconds)
        patience = _PATIENT * given.seconds
        workload = self._tiers(given, _MOSTLY_FLEX, deferral=patience)
        workload = replace(workload, name="flex", title="Mostly requests that can wait")
        return self.own(workload, *_pushed_out(patience))

    def _tiers(
        self, given: WorkloadSettings, shares: tuple[float, float, float], deferral: float
    ) -> Workload:
        rate = _SHARE * self.capacity(128, 32)
        alone = self._alone(lambda given: traffic.poisson(given, rate=rate, adapters=_FEW))
        classes = traffic.service_tiers(
            first_token=_ROOM * alone.first + 0.2,
            between_tokens=3 * alone.between,
            end_to_end=4 * alone.latency + 1.0,
            deferral=deferral,
            shares=shares,
        )
        return traffic.tiers(given, classes, rate=rate, adapters=_FEW)

    def answers(self) -> Contest:
        """Bounds on whole answers, not on single tokens."""
        rate = _SHARE * self.capacity(64, 32)
        alone = self._alone(lambda given: traffic.poisson(given, rate=rate, prompt=64, adapters=SOME))
        given = self.sizes.given(SLO(end_to_end=4.0 * alone.latency + 1.0))
        workload = traffic.poisson(given, rate=rate, prompt=64, adapters=SOME)
        workload = replace(workload, name="answers", title="Poisson arrivals; whole answers wanted in time")
        bound = given.slo.end_to_end or 0.0
        return self.own(workload, *_pushed_out(bound - _ROOM * alone.latency))

    # Inside

    def capacity(self, prompt: int, answer: int) -> float:
        """Requests a second of a shape that the machine answers, 16 at once."""
        given = replace(self.sizes.given(), seconds=0.001)
        one = traffic.poisson(given, rate=1.0, prompt=prompt, answer=answer, adapters=SOME)
        burst = replace(one, requests=tuple(replace(one.requests[0], at=0.0) for _ in range(16)))
        loads = [self.testbed.alone(burst) for _ in range(3)]
        return 16 / median(load.finished_at - load.started for load in loads)

    def _alone(self, make: Callable[[WorkloadSettings], Workload]) -> "Alone":
        return Alone.of(self.testbed.alone(make(self.sizes.given())))

    def bounded(self, make: Callable[[WorkloadSettings], Workload]) -> Workload:
        """A workload with bounds on the first token and between tokens: their values without training, and
        room."""
        alone = self._alone(make)
        return make(self.sizes.given(SLO(_ROOM * alone.first + 0.5, 3 * alone.between)))

    def _bounded(self, make: Callable[[WorkloadSettings], Workload]) -> Contest:
        workload = self.bounded(make)
        return self.own(workload, *_pushed_out(0.5 * (workload.requests[0].slo.first_token or 0.0)))


@dataclass(frozen=True, slots=True)
class Alone:
    """Latencies of requests without training: 99th percentiles, seconds."""

    latency: float
    first: float
    between: float

    @classmethod
    def of(cls, load: LoadResult) -> "Alone":
        """Percentiles of a load without jobs."""
        latencies = [answer.latency for answer in load.answers]
        first = percentile(load.first_tokens, 0.99)
        return cls(percentile(latencies, 0.99), first, percentile(load.gaps, 0.99))


def _pushed_out(seconds: float) -> tuple[str, ...]:
    """Policies that defer requests, with `seconds` as their bound."""
    return (
        f"enhanced-temporal:16,{seconds:.3f}",
        f"deferred:{seconds:.3f}",
        f"deferred:{seconds:.3f},together=1",
    )
