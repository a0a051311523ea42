"""Builds workloads: requests for given arrivals, jobs, adapters, service tiers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from coserve.core.request import SLO
from coserve.workload.prompts import draw_by_popularity
from coserve.workload.requests import TimedJob, TimedRequest, Tokens, training_tokens
from coserve.workload.trace_formats import TraceRow

ENDLESS: Final = 1_000_000  # epochs: more than any run takes


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


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """Existing LoRA adapters, and the skew of their popularity (synthetic)."""

    count: int = 0  # none: requests ask for the base
    rank: int = 8
    exponent: float = 0.0  # of the power law of their popularity; 0 is uniform

    @property
    def served(self) -> tuple[tuple[str, int], ...]:
        return tuple((f"served-{number:02}", self.rank) for number in range(self.count))


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
