"""Loads of a simulation: requests of a trace or of a synthetic mix, and fine-tuning jobs, by seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Final

from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.workload.arrivals import gamma_times, poisson_times, spread_times, steady_times
from coserve.workload.prompts import draw_by_popularity
from coserve.workload.requests import ENDLESS, ServedAdapters, TimedJob, TimedRequest, Tokens
from coserve.workload.trace_formats import BLOCK, TraceRow

ARRIVALS: Final = ("poisson", "bursty", "steady", "spread")
_BURSTS: Final = 3.0  # coefficient of variation of the gaps of bursty arrivals
_EXAMPLES: Final = 16  # of a job at least, before they repeat
_MOST_ROWS: Final = 1 << 22  # of an optimizer step
_MOST_REQUESTS: Final = 20_000_000  # of a run: two days of the largest services; a gigabyte


@dataclass(frozen=True, slots=True)
class TrainingLoad:
    """Fine-tuning beside the requests: `jobs` jobs without end on each engine, of `batch` examples of
    `length` tokens an optimizer step."""

    jobs: int = 0
    batch: int = 4
    length: int = 512

    def __post_init__(self) -> None:
        if self.jobs < 0 or min(self.batch, self.length) < 1:
            raise ConfigError("an optimizer step has at least one example of one token")
        if self.batch * self.length > _MOST_ROWS:
            raise ConfigError(
                f"an optimizer step has at most {_MOST_ROWS:,} tokens, not {self.batch:,} examples of "
                f"{self.length:,}"
            )

    @property
    def rows(self) -> int:
        """Rows of a micro-batch: a whole mini-batch, of at most 2,048 where examples are shorter."""
        return max(min(self.batch * self.length, 2048), self.length)

    def make(self, engines: int) -> list[TimedJob]:
        """The jobs of so many engines."""
        examples = (_zeros(self.length),) * (-(-_EXAMPLES // self.batch) * self.batch)
        return [
            TimedJob(0.0, f"trained-{n:04}", examples, self.batch, epochs=ENDLESS, rows=self.rows)
            for n in range(self.jobs * engines)
        ]


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """Requests within `seconds`: those of `trace`, as recorded or at `rate` a second on average, or a mix of
    `prompt` tokens in and `answer` out that arrive at `rate` by the process `arrivals`."""

    seconds: float
    rate: float | None = None
    trace: tuple[TraceRow, ...] = ()
    prompt: int = 256
    answer: int = 64
    arrivals: str = "poisson"
    slo: SLO = field(default_factory=SLO)
    adapters: ServedAdapters = field(default_factory=ServedAdapters)
    training: TrainingLoad = field(default_factory=TrainingLoad)

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"a simulation takes a positive number of seconds, not {self.seconds:g}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"requests come at a positive rate, not {self.rate:g} a second")
        if not self.trace and self.rate is None:
            raise ConfigError("requests need a trace, or a rate (--trace FILE or --rate NUMBER)")
        if self.arrivals not in ARRIVALS:
            raise ConfigError(f"there are no arrivals {self.arrivals!r}; there are {', '.join(ARRIVALS)}")
        if min(self.prompt, self.answer) < 1:
            raise ConfigError("prompts and answers have at least one token")
        if self.adapters.count > _MOST_REQUESTS:
            raise ConfigError(f"requests name at most {_MOST_REQUESTS:,} adapters")
        if not 0 <= self.adapters.exponent < float("inf"):
            raise ConfigError(f"popularity has an exponent of at least 0, not {self.adapters.exponent:g}")
        if self.rate is not None:
            self._refuse_too_many(self.rate)

    def _refuse_too_many(self, rate: float) -> None:
        if (expected := rate * self.seconds) > _MOST_REQUESTS:
            raise ConfigError(
                f"{expected:.3g} requests would come within {self.seconds:g} s; a run has at most "
                f"{_MOST_REQUESTS:,}: take fewer seconds, or a lower rate"
            )

    @property
    def whole(self) -> float:
        """Seconds from the trace's first request until it begins anew."""
        return self.trace[-1].at + _mean_gap(self.trace)

    @property
    def shares_prefixes(self) -> bool:
        """Tells whether prompts of the trace have common beginnings."""
        return any(row.blocks for row in self.trace)

    def at_rate(self, rate: float | None) -> "SimulatedLoad":
        """The same load at another rate."""
        return replace(self, rate=rate)

    def requests(self, seed: int) -> Iterator[TimedRequest]:
        """The requests, in order of their arrival. A seed draws arrivals and adapters; of a trace it draws
        the place at which its replay begins, and goes on at its beginning."""
        rows = self._traced(seed) if self.trace else self._drawn(seed)
        named = self._named(seed, len(rows))
        for row, adapter in zip(rows, named, strict=True):
            yield TimedRequest(row.at, _prompt(row), row.answer, adapter, self.slo)

    def _drawn(self, seed: int) -> Sequence[TraceRow]:
        assert self.rate is not None, "checked when it was made"
        if self.arrivals == "steady":
            times = steady_times(1 / self.rate, self.seconds)
        elif self.arrivals == "bursty":
            times = gamma_times(self.rate, self.seconds, _BURSTS, seed)
        elif self.arrivals == "spread":
            times = spread_times(2 / self.rate, self.seconds, seed)
        else:
            times = poisson_times(self.rate, self.seconds, seed)
        return [TraceRow(at, self.prompt, self.answer) for at in times]

    def _traced(self, seed: int) -> Sequence[TraceRow]:
        """The trace from some request on, for `seconds`; seed 0 begins at its beginning."""
        trace, whole = self.trace, self.whole
        if self.rate is None and seed:  # it begins anew until the seconds are over
            self._refuse_too_many(len(trace) / whole)
        scale = 1.0 if self.rate is None else len(trace) / (whole * self.rate)
        first = Random(seed).randrange(len(trace)) if seed else 0
        found, begin, number = [], trace[first].at, first
        while (
            at := (trace[number % len(trace)].at - begin + whole * (number // len(trace))) * scale
        ) < self.seconds:
            found.append(replace(trace[number % len(trace)], at=at))
            number += 1
            if self.rate is None and not seed and number == len(trace):
                break  # as recorded: it ends where it ends
        return found

    def _named(self, seed: int, count: int) -> Sequence[str | None]:
        names = [name for name, _ in self.adapters.served]
        return draw_by_popularity(names, count, self.adapters.exponent, seed + 2) if names else [None] * count


def _mean_gap(trace: Sequence[TraceRow]) -> float:
    return trace[-1].at / (len(trace) - 1) if len(trace) > 1 and trace[-1].at > 0 else 1.0


def _prompt(row: TraceRow) -> Tokens:
    """Tokens of a prompt: those of its blocks, which equal ids make equal, or any."""
    if not row.blocks:
        return _zeros(row.prompt)
    return tuple(token for block in row.blocks for token in _block(block))[: row.prompt]


@lru_cache(maxsize=4096)
def _zeros(length: int) -> Tokens:
    return (0,) * length


@lru_cache(maxsize=4096)
def _block(number: int) -> Tokens:
    return (number,) * BLOCK
