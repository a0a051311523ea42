"""Requests and training data to measure with: seeded, and the same on every machine. Free of torch."""

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from coserve.core.request import SLO
from coserve.errors import ConfigError, DataError

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A prompt, the tokens of its answer, and when it arrives: seconds after the load begins.

    `slo` are its own bounds: what a scheduler may know, and what it is judged by.
    """

    at: float
    prompt: Tokens
    answer: int
    adapter: str | None = None
    slo: SLO = field(default_factory=SLO)


@dataclass(frozen=True, slots=True)
class TimedJob:
    """Fine-tuning that is asked for `at` seconds after the load begins, of a LoRA adapter of its own.

    An optimizer step takes `batch` of the `examples`, which pass `epochs` times; `targets` are the ends of
    the linears' names, None for all of them. A micro-batch is a whole mini-batch, of at most `rows` rows.
    """

    at: float
    adapter: str
    examples: tuple[Tokens, ...]
    batch: int
    rank: int = 8
    targets: tuple[str, ...] | None = None
    epochs: int = 1
    rows: int = 2048
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that is asked of a machine for `seconds`: requests, jobs, and the adapters that are there.

    `served` are LoRA adapters (name, rank) that requests may name. `title` says in one line what it is and
    whose, `scale` by how much it was changed to fit the machine.
    """

    name: str
    title: str
    seconds: float
    requests: tuple[TimedRequest, ...]
    jobs: tuple[TimedJob, ...]
    served: tuple[tuple[str, int], ...] = ()
    scale: str = ""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A request of a recorded trace: seconds since the first one, tokens in, tokens out."""

    at: float
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class ScaledTrace:
    """A trace made to fit a machine, and by how much each of its dimensions was changed for that."""

    rows: tuple[TraceRow, ...]
    time_scale: float  # scaled seconds for each recorded one
    prompt_scale: float
    answer_scale: float

    def describe(self) -> str:
        """One line for the reader of a report."""
        return (
            f"{len(self.rows)} requests of the trace, gaps x {self.time_scale:.3g}, "
            f"prompts x {self.prompt_scale:.3g}, answers x {self.answer_scale:.3g}"
        )


def fixed_prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[Tokens]:
    """`count` prompts of `length` random tokens below `vocabulary`."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(vocabulary) for _ in range(length)) for _ in range(count)]


def training_tokens(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[Tokens]:
    """Training examples of these lengths, of random tokens below `vocabulary`."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(vocabulary) for _ in range(length)) for length in lengths]


def poisson_times(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Instants in [0, seconds) of a Poisson process of `rate` arrivals a second, given their number.

    The number is the expected one: a process conditioned on it has independent, uniform instants. So the
    load offered is exactly the one asked for, whatever the seed.
    """
    if not rate > 0 or not seconds > 0:
        raise ConfigError(f"arrivals need a positive rate and duration, not {rate} a second for {seconds} s")
    draw = random.Random(seed)
    return sorted(draw.uniform(0.0, seconds) for _ in range(max(1, round(rate * seconds))))


def poisson_requests(
    rate: float,
    seconds: float,
    prompt: int,
    answer: int,
    vocabulary: int,
    seed: int = 0,
    slo: SLO = SLO(),
) -> list[TimedRequest]:
    """Requests of one shape (`prompt` tokens in, `answer` out) that arrive as `poisson_times` says."""
    times = poisson_times(rate, seconds, seed)
    prompts = fixed_prompts(len(times), prompt, vocabulary, seed + 1)
    return [TimedRequest(at, tokens, answer, slo=slo) for at, tokens in zip(times, prompts, strict=True)]


def read_trace(path: str | Path) -> list[TraceRow]:
    """An Azure LLM inference trace: columns TIMESTAMP, ContextTokens, GeneratedTokens, in order of time.

    Raises DataError with file, line and what was expected.
    """
    rows: list[TraceRow] = []
    first: datetime | None = None
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        for record in reader:
            try:
                # Seven decimals are more than a datetime has.
                when = datetime.fromisoformat(record["TIMESTAMP"].strip()[:26])
                prompt, answer = int(record["ContextTokens"]), int(record["GeneratedTokens"])
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise DataError(
                    f"{path}, line {reader.line_num}: expected TIMESTAMP, ContextTokens and GeneratedTokens "
                    f"(a time and two numbers), got {error}"
                ) from error
            first = when if first is None else first
            rows.append(TraceRow((when - first).total_seconds(), prompt, answer))
    if not rows:
        raise DataError(f"{path}: expected a trace with at least one request, found none")
    return sorted(rows, key=lambda row: row.at)


def scale_trace(
    trace: Sequence[TraceRow], rate: float, seconds: float, longest_prompt: int, longest_answer: int
) -> ScaledTrace:
    """The beginning of a trace at `rate` requests a second on average, for `seconds`.

    Every gap is multiplied by one factor and every length by another, so that bursts and the shapes of
    the distributions stay; lengths are never stretched, and none falls below one token. `longest_prompt`
    and `longest_answer` are what the trace's longest ones become.
    """
    if not trace:
        raise ConfigError("there is no trace to scale")
    if not (rate > 0 and seconds > 0 and longest_prompt > 0 and longest_answer > 0):
        raise ConfigError("a trace is scaled to a positive rate, duration and longest prompt and answer")
    wanted = trace[: max(1, round(rate * seconds))]
    span = wanted[-1].at
    # The last of n arrivals comes, on average, n / (n + 1) of the way.
    time_scale = seconds * len(wanted) / (len(wanted) + 1) / span if span > 0 else 1.0
    return fit_trace(wanted, time_scale, longest_prompt, longest_answer)


def fit_trace(
    rows: Sequence[TraceRow], time_scale: float, longest_prompt: int, longest_answer: int
) -> ScaledTrace:
    """Rows with every instant multiplied by `time_scale`, and lengths so that the longest ones become those
    given; none is stretched, and none falls below one token."""
    prompt_scale = min(1.0, longest_prompt / max(1, *(row.prompt for row in rows)))
    answer_scale = min(1.0, longest_answer / max(1, *(row.answer for row in rows)))
    scaled = tuple(
        TraceRow(row.at * time_scale, _scaled(row.prompt, prompt_scale), _scaled(row.answer, answer_scale))
        for row in rows
    )
    return ScaledTrace(scaled, time_scale, prompt_scale, answer_scale)


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))
