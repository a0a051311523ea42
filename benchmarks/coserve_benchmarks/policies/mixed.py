"""Workloads of the benchmarks: their requests' shapes and tiers, and words for them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.workload.requests import ServedAdapters, Workload
from coserve.workload.trace_formats import TraceRow
from coserve_benchmarks.mixes import TrainingSpec, WorkloadSettings, make_job, make_requests


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
