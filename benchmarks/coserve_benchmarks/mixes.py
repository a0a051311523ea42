"""Workloads of the benchmarks: requests for given arrivals, jobs, prompts as tokens, parts of traces."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from coserve.core.request import SLO
from coserve.errors import ConfigError, DataError
from coserve.workload.arrivals import check_positive
from coserve.workload.prompts import draw_by_popularity
from coserve.workload.requests import ENDLESS, ServedAdapters, TimedJob, TimedRequest, Tokens, training_tokens
from coserve.workload.trace_formats import TraceRow
from coserve.workload.traces import ScaledTrace, fit_trace

Tokenizer = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """Settings that all workloads of a run share."""

    vocabulary: int  # token ids are below it
    seconds: float  # that requests arrive in
    slo: SLO = field(default_factory=SLO)  # of every request
    seed: int = 0
    prompts: tuple[Tokens, ...] = ()  # drawn from and cut to length; of random tokens where there are none


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """The fine-tuning jobs of a workload: LoRA, on random tokens."""

    batch: int = 4  # examples an optimizer step
    length: int = 512  # tokens an example
    rank: int = 8
    targets: tuple[str, ...] | None = None  # ends of the linears' names; None for all
    examples: int = 64  # different ones, before they repeat
    epochs: int = ENDLESS
    rows: int = 2048  # of a micro-batch at most
    weights: tuple[float, ...] = (1.0,)  # of the jobs, one each


def make_job(settings: WorkloadSettings, training: TrainingSpec, number: int, at: float = 0.0) -> TimedJob:
    """The `number`-th job: an adapter and data of its own."""
    lengths = [training.length] * training.examples
    return TimedJob(
        at,
        f"trained-{number:02}",
        tuple(training_tokens(lengths, settings.vocabulary, settings.seed + 1000 + number)),
        training.batch,
        training.rank,
        training.targets,
        training.epochs,
        training.rows,
        training.weights[number % len(training.weights)],
    )


def make_requests(
    settings: WorkloadSettings, rows: Sequence[TraceRow], adapters: ServedAdapters, exact: bool = False
) -> tuple[TimedRequest, ...]:
    """A request for each row, in order. Texts shorter than their row are kept, or with `exact` repeated to
    its length."""
    draw = random.Random(settings.seed + 1)
    named = _named(adapters, len(rows), settings.seed)
    found = []
    for row, adapter in zip(rows, named, strict=True):
        if settings.prompts:
            text = draw.choice(settings.prompts)
            again = -(-row.prompt // len(text)) if exact else 1
            prompt = (text * again)[: row.prompt]
        else:
            prompt = tuple(draw.randrange(settings.vocabulary) for _ in range(row.prompt))
        found.append(TimedRequest(row.at, prompt, row.answer, adapter, settings.slo))
    return tuple(found)


def _named(adapters: ServedAdapters, count: int, seed: int) -> Sequence[str | None]:
    if not adapters.count:
        return [None] * count
    return draw_by_popularity([name for name, _ in adapters.served], count, adapters.exponent, seed + 2)


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer, longest: int) -> tuple[Tokens, ...]:
    """Token ids of each text, cut after `longest`. Raises DataError for a text without tokens."""
    if longest < 1:
        raise ConfigError(f"the longest prompt has at least one token, not {longest}")
    found = tuple(tuple(tokenizer(text)[:longest]) for text in texts)
    if () in found:
        raise DataError(f"the tokenizer makes nothing of prompt {found.index(()) + 1}")
    return found


def word_tokenizer(vocabulary: int, seed: int = 0) -> Tokenizer:
    """A stand-in for the tokenizer of a model with random weights, which has none: each word's hash, below
    `vocabulary`. Lengths and repetitions are those of real text; the ids have no meaning."""
    if vocabulary < 1:
        raise ConfigError(f"a vocabulary has at least one token, not {vocabulary}")
    key = seed.to_bytes(8, "little", signed=True)

    def tokenize(text: str) -> list[int]:
        digests = (blake2b(word.encode(), digest_size=8, key=key).digest() for word in text.split())
        return [int.from_bytes(digest, "little") % vocabulary for digest in digests]

    return tokenize


@dataclass(frozen=True, slots=True)
class TracePart:
    """A replayed part of a trace: its place, the share of requests kept, and its scaling."""

    scaled: ScaledTrace
    begin: float  # recorded seconds
    recorded: float  # seconds from there on
    kept: int  # requests
    found: int

    def arrivals(self) -> str:
        """Describes the part of the trace that the arrivals come from, and how it was scaled."""
        return (
            f"seconds {self.begin:.0f} to {self.begin + self.recorded:.0f} of the trace, "
            f"{self.kept} of its {self.found} requests drawn at random, time x {self.scaled.time_scale:.3g}"
        )

    def lengths(self) -> str:
        """Describes how lengths were scaled."""
        return f"prompts x {self.scaled.prompt_scale:.3g}, answers x {self.scaled.answer_scale:.3g}"


def trace_part(
    trace: Sequence[TraceRow],
    rate: float,
    seconds: float,
    *,
    begin: float,
    length: float,
    longest_prompt: int,
    longest_answer: int,
    seed: int = 0,
) -> TracePart:
    """`length` recorded seconds of a trace from `begin` on, replayed in `seconds` at `rate` a second.

    Time is compressed and requests are dropped at random with equal chance, which keeps the shape of
    arrivals. Lengths are scaled as by `scale_trace`. Raises ConfigError if there are too few requests.
    """
    check_positive(rate=rate, seconds=seconds, length=length)
    check_positive(longest_prompt=longest_prompt, longest_answer=longest_answer)
    found = [row for row in trace if begin <= row.at < begin + length]
    wanted = max(1, round(rate * seconds))
    if wanted > len(found):
        raise ConfigError(
            f"{wanted} requests are wanted, but seconds {begin:g} to {begin + length:g} of the trace have "
            f"{len(found)}: choose a longer part or a lower rate"
        )
    drawn = sorted(random.Random(seed).sample(range(len(found)), wanted))
    kept = [TraceRow(found[i].at - begin, found[i].prompt, found[i].answer) for i in drawn]
    scaled = fit_trace(kept, seconds / length, longest_prompt, longest_answer)
    return TracePart(scaled, begin, length, wanted, len(found))
