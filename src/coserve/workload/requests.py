"""Workloads: requests and fine-tuning jobs with their tokens; seeded."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from coserve.core.request import SLO, SamplingParams
from coserve.workload.arrivals import poisson_times

Tokens = tuple[int, ...]
ENDLESS: Final = 1_000_000  # epochs: more than any run takes


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A prompt, the number of its answer's tokens, and its arrival in seconds after the load begins.

    `slo` are its bounds, for scheduling and for evaluation.
    """

    at: float
    prompt: Tokens
    answer: int
    adapter: str | None = None
    slo: SLO = field(default_factory=SLO)


@dataclass(frozen=True, slots=True)
class TimedJob:
    """A fine-tuning job of a LoRA adapter of its own, created `at` seconds after the load begins.

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
    """Requests and jobs of `seconds` seconds, and the adapters that exist from the start.

    `served` are LoRA adapters (name, rank) that requests may name. `title` describes it and its origin in one
    line, `scale` its scaling to the machine.
    """

    name: str
    title: str
    seconds: float
    requests: tuple[TimedRequest, ...]
    jobs: tuple[TimedJob, ...]
    served: tuple[tuple[str, int], ...] = ()
    scale: str = ""


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """Existing LoRA adapters, and the skew of their popularity (synthetic)."""

    count: int = 0  # none: requests ask for the base
    rank: int = 8
    exponent: float = 0.0  # of the power law of their popularity; 0 is uniform

    @property
    def served(self) -> tuple[tuple[str, int], ...]:
        return tuple((f"served-{number:02}", self.rank) for number in range(self.count))


def greedy(answer: int) -> SamplingParams:
    """Greedy answers of exactly `answer` tokens."""
    return SamplingParams(max_tokens=answer, ignore_eos=True)


def fixed_prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[Tokens]:
    """`count` prompts of `length` random tokens below `vocabulary`."""
    return training_tokens([length] * count, vocabulary, seed)


def training_tokens(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[Tokens]:
    """Training examples of these lengths, of random tokens below `vocabulary`."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(vocabulary) for _ in range(length)) for length in lengths]


def poisson_requests(
    rate: float,
    seconds: float,
    prompt: int,
    answer: int,
    vocabulary: int,
    seed: int = 0,
    slo: SLO = SLO(),
) -> list[TimedRequest]:
    """Requests of one shape (`prompt` tokens in, `answer` out) that arrive at `poisson_times`."""
    times = poisson_times(rate, seconds, seed)
    prompts = fixed_prompts(len(times), prompt, vocabulary, seed + 1)
    return [TimedRequest(at, tokens, answer, slo=slo) for at, tokens in zip(times, prompts, strict=True)]
