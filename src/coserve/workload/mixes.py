"""Builds workloads: requests for given arrivals, jobs, adapters, service tiers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.workload.prompts import draw_by_popularity
from coserve.workload.requests import TimedJob, TimedRequest, Tokens, Workload, training_tokens
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


@dataclass(frozen=True, slots=True)
class Tier:
    """A class of service: its share of the requests, and their bounds."""

    name: str
    share: float
    slo: SLO


def make_workload(
    settings: WorkloadSettings,
    name: str,
    title: str,
    rows: Sequence[TraceRow],
    training: TrainingSpec,
    adapters: ServedAdapters,
    scale: str,
    exact: bool = False,
) -> Workload:
    """A workload with jobs from the beginning. `exact` gives prompts the exact lengths of their rows."""
    jobs = tuple(make_job(settings, training, number) for number in range(len(training.weights)))
    requests = make_requests(settings, rows, adapters, exact)
    said = f"{scale}; {describe_adapters(adapters)}" if adapters.count else scale
    return Workload(name, title, settings.seconds, requests, jobs, adapters.served, said)


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


def uniform_rows(times: Sequence[float], prompt: int, answer: int) -> list[TraceRow]:
    """Requests of one shape at these times."""
    if prompt < 1 or answer < 1:
        raise ConfigError(f"a prompt and its answer have at least one token, not {prompt} and {answer}")
    return [TraceRow(at, prompt, answer) for at in times]


def assign_tiers(classes: Sequence[Tier], count: int, seed: int) -> list[SLO]:
    """The bounds of `count` requests: each tier's share of them, rounded to a total of `count`."""
    total = sum(tier.share for tier in classes)
    if not classes or any(tier.share < 0 for tier in classes) or not total > 0:
        raise ConfigError("tiers need shares that are not negative, and one that is positive")
    found: list[SLO] = []
    before = 0.0
    for tier in classes:
        before += tier.share
        found += [tier.slo] * (round(count * before / total) - len(found))
    random.Random(seed + 3).shuffle(found)
    return found


def describe_lengths(settings: WorkloadSettings, prompt: int, answer: int) -> str:
    """Describes the contents of prompts, and the lengths of prompts and answers."""
    most = f"at most {prompt} tokens of one of {len(settings.prompts)} texts"
    return f"{most if settings.prompts else f'{prompt} random tokens'} in, {answer} out"


def describe_adapters(adapters: ServedAdapters) -> str:
    """Describes the adapters that requests name, and the law of their popularity."""
    if not adapters.count:
        return "no adapters"
    synthetic = f"by a synthetic power law of exponent {adapters.exponent:g}"
    law = synthetic if adapters.exponent else "uniformly"
    return f"{adapters.count} adapters of rank {adapters.rank}, asked for {law}"


def describe_bounds(slo: SLO) -> str:
    """Describes the bounds in force."""
    names = {
        "first_token": "first token",
        "between_tokens": "between tokens",
        "end_to_end": "answer",
        "deferral": "deferral",
    }
    set_ = ((text, getattr(slo, name)) for name, text in names.items())
    return ", ".join(f"{text} {value:.3g} s" for text, value in set_ if value is not None) or "no bounds"
