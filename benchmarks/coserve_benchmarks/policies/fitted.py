"""The workloads of a contest, fitted to the machine: rates by its capacity, bounds by its times without
training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from coserve.core.request import SLO
from coserve.simulate.intervals import percentile
from coserve.simulate.replay import LoadResult
from coserve.workload.requests import ServedAdapters, Tokens, Workload
from coserve.workload.trace_formats import TraceRow
from coserve_benchmarks.mixes import WorkloadSettings
from coserve_benchmarks.policies import traffic
from coserve_benchmarks.policies.contest import OURS, Contest, Judge, own_bounds
from coserve_benchmarks.policies.mixed import describe_bounds
from coserve_benchmarks.policies.testbed import Testbed

EVERYWHERE: Final = (
    "spatial",
    "idle-only",
    "temporal:8,grain=batch",
    "continuous",
    "hybrid",
    OURS,
)
ROOM: Final = 1.5  # bounds over what requests take without training, where a workload's source has none
SOME: Final = ServedAdapters()  # requests ask for the base: what adapters cost is not the question here
_FEW: Final = ServedAdapters(count=2, rank=8, exponent=1.0)
_SHARE: Final = 0.12  # of the requests that the machine answers 16 at once; few at once take much more of it
_MOSTLY_FLEX: Final = (0.1, 0.3, 0.6)  # of the requests: priority, default, flex
_PATIENT: Final = 1 / 3  # of a round's length: what flex requests among mostly such ones can be deferred by
_OWN: Final = "own bounds"
Make = Callable[[WorkloadSettings, float], Workload]  # a workload of so many requests a second


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
class FittedTraffic(ABC):
    """A contest on each kind of traffic."""

    testbed: Testbed
    sizes: RoundSettings

    @abstractmethod
    def contest(
        self, workload: Workload, policies: Sequence[str], judges: dict[str, Judge], bounds: dict[str, str]
    ) -> Contest:
        """Runs every policy on a workload; the first of the judges counts where one must."""

    def own(self, workload: Workload, *more: str) -> Contest:
        """A contest on the bounds that the requests state."""
        stated = ", ".join(sorted({describe_bounds(request.slo) for request in workload.requests}))
        return self.contest(workload, (*EVERYWHERE, *more), {_OWN: own_bounds}, {_OWN: stated})

    # General traffic

    def flexllm(self) -> Contest:
        """FlexLLM's lengths, with bounds on the first token and between tokens."""
        return self._bounded((256, 64), lambda given, rate: traffic.flexllm(given, rate=rate, adapters=SOME))

    def poisson(self) -> Contest:
        """Poisson arrivals: independent users."""
        return self._bounded((128, 32), lambda given, rate: traffic.poisson(given, rate=rate, adapters=SOME))

    def bursty(self) -> Contest:
        """Bursts: users that come together."""
        return self._bounded((128, 32), lambda given, rate: traffic.bursty(given, rate=rate, adapters=SOME))

    def azure(self) -> Contest:
        """Recorded arrivals and lengths."""
        trace = self.sizes.trace
        return self._bounded(
            (128, 32),
            lambda given, rate: traffic.azure(
                given, trace, rate=rate, longest_prompt=512, longest_answer=64, adapters=SOME
            ),
        )

    def azure_arrivals(self) -> Contest:
        """Recorded arrivals, lengths of FlexLLM's case study."""
        trace = self.sizes.trace
        return self._bounded((64, 32), lambda given, rate: traffic.azure_arrivals(given, trace, rate=rate))

    def tiers(self) -> Contest:
        """Our own service tiers, with two jobs of different weight."""
        workload = self._tiers(traffic.SHARES, deferral=3.0)
        return self.own(workload, "enhanced-temporal:16,0.5", *pushed_out(0.5))

    def flex(self) -> Contest:
        """Mostly patient requests, as in batch tiers; rounds are twice as long."""
        patience = self.flex_patience
        workload = self._tiers(_MOSTLY_FLEX, deferral=patience, times=2.0)
        workload = replace(workload, name="flex", title="Mostly requests that can wait")
        return self.own(workload, *pushed_out(patience))

    def answers(self) -> Contest:
        """Bounds on whole answers, not on single tokens."""

        def make(given: WorkloadSettings, rate: float) -> Workload:
            return traffic.poisson(given, rate=rate, prompt=64, adapters=SOME)

        rate = self.rate(make, 64, 32)
        alone = self._alone(make, rate)
        given = self.given(rate, SLO(end_to_end=4.0 * alone.latency + 1.0))
        workload = make(given, rate)
        workload = replace(workload, name="answers", title="Poisson arrivals; whole answers wanted in time")
        bound = given.slo.end_to_end or 0.0
        return self.own(workload, *pushed_out(bound - ROOM * alone.latency))

    # Inside

    @property
    def flex_patience(self) -> float:
        """Seconds that training may defer a request of those that can wait."""
        return _PATIENT * 2 * self.sizes.seconds

    def rate(self, make: Make, prompt: int, answer: int) -> float:
        """Requests a second of a traffic whose requests are about `prompt` tokens in and `answer` out."""
        return _SHARE * self.capacity(prompt, answer)

    def given(self, rate: float, slo: SLO = SLO()) -> WorkloadSettings:
        """Settings of a workload with `rate` requests a second."""
        return self.sizes.given(slo)

    def capacity(self, prompt: int, answer: int) -> float:
        """Requests a second of a shape that the machine answers, 16 at once."""
        given = replace(self.sizes.given(), seconds=0.001)
        one = traffic.poisson(given, rate=1.0, prompt=prompt, answer=answer, adapters=SOME)
        burst = replace(one, requests=tuple(replace(one.requests[0], at=0.0) for _ in range(16)))
        loads = [self.testbed.alone(burst) for _ in range(3)]
        return 16 / median(load.finished_at - load.started for load in loads)

    def bounded(self, make: Make, rate: float) -> Workload:
        """A workload with bounds on the first token and between tokens: their values without training, and
        room."""
        alone = self._alone(make, rate)
        return make(self.given(rate, SLO(ROOM * alone.first + 0.5, 3 * alone.between)), rate)

    def _alone(self, make: Make, rate: float) -> "Alone":
        return Alone.of(self.testbed.alone(make(self.given(rate), rate)))

    def _bounded(self, shape: tuple[int, int], make: Make) -> Contest:
        workload = self.bounded(make, self.rate(make, *shape))
        return self.own(workload, *pushed_out(0.5 * (workload.requests[0].slo.first_token or 0.0)))

    def _tiers(self, shares: tuple[float, float, float], deferral: float, times: float = 1.0) -> Workload:
        def make(given: WorkloadSettings, rate: float) -> Workload:
            return traffic.poisson(given, rate=rate, adapters=_FEW)

        rate = self.rate(make, 128, 32)
        alone = self._alone(make, rate)
        classes = traffic.service_tiers(
            first_token=ROOM * alone.first + 0.2,
            between_tokens=3 * alone.between,
            end_to_end=4 * alone.latency + 1.0,
            deferral=deferral,
            shares=shares,
        )
        given = self.given(rate)
        given = replace(given, seconds=times * given.seconds)
        return traffic.tiers(given, classes, rate=rate, adapters=_FEW)


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


def pushed_out(seconds: float) -> tuple[str, ...]:
    """Policies that defer requests, with `seconds` as their bound."""
    return (
        f"enhanced-temporal:16,{seconds:.3f}",
        f"deferred:{seconds:.3f}",
        f"deferred:{seconds:.3f},together=1",
        f"heterogeneous:{seconds:.3f}",
    )
