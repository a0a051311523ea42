"""Sweeps over policies, hardware and rates, with intervals over seeds, and comparisons of two policies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Final

from coserve.simulate.fleet import FleetResult
from coserve.simulate.intervals import mean_interval, percentile
from coserve.simulate.loads import SimulatedLoad
from coserve.simulate.runs import FleetSettings, Simulator

Progress = Callable[[str, float], object]  # a cell's name, and the share of it that is done
COMPARED: Final = ("within", "training", "output", "ttft_p99", "time_per_token_mean")


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run: counts, the share of requests within all their bounds, and seconds (None where nothing was
    answered). Time per token is the mean over an answer's tokens after the first; rates are tokens a
    second."""

    requests: int
    unanswered: int
    refused: int
    within: float
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    time_per_token_mean: float | None
    time_per_token_p99: float | None
    gap_p99: float | None
    output: float
    training: float
    steps: int
    events: int

    def as_dict(self) -> dict[str, float | int | None]:
        """The figures by name."""
        return asdict(self)


def figures_of(found: FleetResult) -> RunFigures:
    """Figures of what a fleet did. Requests that were refused count as asked, and keep no bound."""
    done = [answer for answer in found.answers if answer.is_done]
    asked = len(found.answers)
    first = [answer.first_token for answer in done]
    each = [seconds for answer in done if (seconds := answer.token_seconds) is not None]
    return RunFigures(
        requests=asked,
        unanswered=asked - len(done),
        refused=len(found.refused),
        within=sum(answer.is_within for answer in found.answers) / asked if asked else 1.0,
        ttft_mean=_mean(first),
        ttft_p50=_of(first, 0.5),
        ttft_p99=_of(first, 0.99),
        time_per_token_mean=_mean(each),
        time_per_token_p99=_of(each, 0.99),
        gap_p99=_of([answer.longest for answer in done if answer.tokens > 1], 0.99),
        output=found.tokens / found.seconds,
        training=found.trained / found.seconds,
        steps=found.steps,
        events=found.events,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _of(values: Sequence[float], share: float) -> float | None:
    return percentile(values, share) if values else None


@dataclass(frozen=True, slots=True)
class Cell:
    """Runs of one policy on one hardware at one rate, a seed each."""

    policy: str
    hardware: str
    rate: float | None  # None: as recorded
    devices: int
    cache_tokens: int
    runs: tuple[RunFigures, ...]
    refusal: str = ""  # why a request could never be served

    def values(self, name: str) -> list[float]:
        """A figure of each run that has it."""
        found = (getattr(run, name) for run in self.runs)
        return [value for value in found if value is not None]

    def mean(self, name: str) -> float | None:
        """The mean over the seeds."""
        values = self.values(name)
        return fmean(values) if values else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: means and their intervals by figure, and every run."""
        names = [name for name in asdict(self.runs[0]) if name not in ("steps", "events")]
        return {
            "policy": self.policy,
            "hardware": self.hardware,
            "rate": self.rate,
            "devices": self.devices,
            "cache_tokens": self.cache_tokens,
            "mean": {name: self.mean(name) for name in names},
            "interval": {name: mean_interval(self.values(name)) for name in names},
            "runs": [run.as_dict() for run in self.runs],
            "refusal": self.refusal,
        }


def sweep(
    settings: FleetSettings,
    load: SimulatedLoad,
    policies: Sequence[str],
    hardware: Sequence[str],
    rates: Sequence[float | None],
    seeds: Sequence[int],
    progress: Progress = lambda name, share: None,
) -> Iterator[Cell]:
    """Cells of all combinations, as they are done. Raises ConfigError before the first run if any of them
    cannot be simulated."""
    simulators = [
        Simulator(replace(settings, policy=policy, hardware=device), load.at_rate(rate))
        for device in hardware
        for rate in rates
        for policy in policies
    ]
    for simulator in simulators:
        yield run_cell(simulator, seeds, progress)


def run_cell(
    simulator: Simulator,
    seeds: Sequence[int],
    progress: Progress = lambda name, share: None,
    most_late: float = float("inf"),
) -> Cell:
    """Runs one cell. A run ends early once more than `most_late` answers have missed a bound."""
    settings, load = simulator.settings, simulator.load
    name = f"{settings.policy} on {settings.hardware}" + (f" at {load.rate:g}/s" if load.rate else "")
    runs, refusal = [], ""
    for place, seed in enumerate(seeds):
        begun, part = place / len(seeds), 1 / len(seeds)

        def note(now: float, begun: float = begun, part: float = part) -> None:
            progress(name, begun + part * min(now / load.seconds, 1.0))

        found = simulator.run(seed, note, most_late=most_late)
        runs.append(figures_of(found))
        refusal = refusal or next(iter(found.refused), "")
    return Cell(
        settings.policy,
        settings.hardware,
        load.rate,
        settings.devices,
        simulator.cache_tokens,
        tuple(runs),
        refusal,
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of two policies: their means, and the mean difference of paired seeds with its interval."""

    name: str
    first: float
    second: float
    difference: float
    interval: tuple[float, float] | None

    @property
    def is_sure(self) -> bool:
        """Tells whether the interval excludes zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


def compare(first: Cell, second: Cell, names: Sequence[str] = COMPARED) -> list[Difference]:
    """Differences of the second policy from the first, over the same seeds and requests."""
    found = []
    for name in names:
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(first.runs, second.runs, strict=True)]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if known:
            differences = [b - a for a, b in known]
            means = (fmean(a for a, _ in known), fmean(b for _, b in known))
            found.append(Difference(name, *means, fmean(differences), mean_interval(differences)))
    return found
