"""The workloads that policies are judged on: those of the papers, general ones, and a recorded trace.

Each function gives a `Workload`: the same for the same arguments on every machine. Its `scale` says what it
was made of here and what its paper has in that place.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from coserve.core.request import SLO
from coserve.workload.arrivals import gamma_times, poisson_times, spread_times, steady_times
from coserve.workload.requests import ServedAdapters, Workload
from coserve.workload.trace_formats import TraceRow
from coserve_benchmarks.mixes import TrainingSpec, WorkloadSettings, make_job, make_requests, trace_part
from coserve_benchmarks.policies.mixed import (
    Tier,
    assign_tiers,
    describe_adapters,
    describe_bounds,
    describe_lengths,
    make_workload,
    uniform_rows,
)

SHARES: Final = (0.3, 0.4, 0.3)  # of requests in three tiers of service
MLP: Final = ("gate_proj", "up_proj", "down_proj")  # the linears that FlexLLM adapts


def report(
    settings: WorkloadSettings,
    *,
    every: float = 0.1,
    tune_every: float = 20.0,
    examples: int = 512,
    prompt: int = 64,
    answer: int = 32,
    training: TrainingSpec = TrainingSpec(batch=32, rank=32),
    adapters: ServedAdapters = ServedAdapters(32, 32),
) -> Workload:
    """The multi-LoRA report's (5.2.1, table 5.1): a request every `every` seconds, and every `tune_every`
    seconds, from the beginning on, a job that passes `examples` examples once."""
    rows = uniform_rows(steady_times(every, settings.seconds), prompt, answer)
    once = replace(training, examples=examples, epochs=1)
    jobs = [
        make_job(settings, once, n, at) for n, at in enumerate(steady_times(tune_every, settings.seconds))
    ]
    scale = (
        f"a request every {every:.3g} s (there 0.1), {examples} examples in batches of {training.batch} "
        f"every {tune_every:.3g} s (there 512 in batches of 32 every 20), "
        f"{describe_lengths(settings, prompt, answer)}, {describe_adapters(adapters)} (there 32 of rank 32)"
    )
    return Workload(
        "report",
        "Multi-LoRA report, table 5.1: steady requests, bursts of fine-tuning",
        settings.seconds,
        make_requests(settings, rows, adapters),
        tuple(jobs),
        adapters.served,
        scale,
    )


def fineinfer(
    settings: WorkloadSettings,
    *,
    deferral: float,
    spread: float = 2.0,
    prompt: int = 64,
    answer: int = 32,
    training: TrainingSpec = TrainingSpec(),
    adapters: ServedAdapters = ServedAdapters(),
) -> Workload:
    """FineInfer's (4.1): each request within `spread` seconds of the last one, with this bound on how long
    training may defer it; fine-tuning without end."""
    deferring = replace(settings, slo=replace(settings.slo, deferral=deferral))
    rows = uniform_rows(spread_times(spread, settings.seconds, settings.seed), prompt, answer)
    said = (
        f"each request within {spread:.3g} s of the last one (there 2), deferred by at most {deferral:.3g} s"
    )
    return make_workload(
        deferring,
        "fineinfer",
        "FineInfer, 4.1: requests at random intervals, with a deferral bound",
        rows,
        training,
        adapters,
        f"{said}, {describe_lengths(settings, prompt, answer)}",
    )


def flexllm(
    settings: WorkloadSettings,
    *,
    rate: float,
    prompt: int = 256,
    answer: int = 64,
    training: TrainingSpec = TrainingSpec(batch=1, length=1024, rank=8, targets=MLP),
    adapters: ServedAdapters = ServedAdapters(),
) -> Workload:
    """FlexLLM's (8.1): `rate` requests a second, and long examples that train the linears of the MLP."""
    rows = uniform_rows(poisson_times(rate, settings.seconds, settings.seed), prompt, answer)
    lengths = describe_lengths(settings, prompt, answer)
    said = f"{rate:.3g} requests a second (there up to 10), {lengths} (there 256 and 64)"
    return make_workload(
        settings,
        "flexllm",
        "FlexLLM, 8.1: long prompts beside 1,024-token examples",
        rows,
        training,
        adapters,
        f"{said}, examples of {training.length} tokens (there 1,024)",
    )


def poisson(
    settings: WorkloadSettings,
    *,
    rate: float,
    prompt: int = 128,
    answer: int = 32,
    training: TrainingSpec = TrainingSpec(),
    adapters: ServedAdapters = ServedAdapters(),
) -> Workload:
    """Requests that know nothing of each other."""
    rows = uniform_rows(poisson_times(rate, settings.seconds, settings.seed), prompt, answer)
    said = f"{rate:.3g} requests a second, {describe_lengths(settings, prompt, answer)}"
    return make_workload(settings, "poisson", "Poisson arrivals", rows, training, adapters, said)


def bursty(
    settings: WorkloadSettings,
    *,
    rate: float,
    variation: float = 3.0,
    prompt: int = 128,
    answer: int = 32,
    training: TrainingSpec = TrainingSpec(),
    adapters: ServedAdapters = ServedAdapters(),
) -> Workload:
    """Requests in bursts: Gamma gaps with this coefficient of variation (a Poisson process has 1)."""
    rows = uniform_rows(gamma_times(rate, settings.seconds, variation, settings.seed), prompt, answer)
    said = (
        f"{rate:.3g} requests a second on average, gaps with a coefficient of variation of {variation:.3g}, "
        f"{describe_lengths(settings, prompt, answer)}"
    )
    return make_workload(settings, "bursty", "Bursts: Gamma arrivals", rows, training, adapters, said)


def azure(
    settings: WorkloadSettings,
    trace: Sequence[TraceRow],
    *,
    rate: float,
    begin: float = 0.0,
    length: float = 360.0,
    longest_prompt: int = 1024,
    longest_answer: int = 128,
    training: TrainingSpec = TrainingSpec(),
    adapters: ServedAdapters = ServedAdapters(),
) -> Workload:
    """`length` recorded seconds of an Azure trace from `begin` on: arrivals, prompts and answers, scaled."""
    part = trace_part(
        trace,
        rate,
        settings.seconds,
        begin=begin,
        length=length,
        longest_prompt=longest_prompt,
        longest_answer=longest_answer,
        seed=settings.seed,
    )
    rows = part.scaled.rows
    said = f"{part.arrivals()}, {part.lengths()}"
    title = "Azure conversations, 2023"
    return make_workload(settings, "azure", title, rows, training, adapters, said, exact=True)


def azure_arrivals(
    settings: WorkloadSettings,
    trace: Sequence[TraceRow],
    *,
    rate: float,
    begin: float = 0.0,
    length: float = 360.0,
    prompt: int = 64,
    answer: int = 32,
    training: TrainingSpec = TrainingSpec(batch=1, length=1024, rank=8, targets=MLP),
    adapters: ServedAdapters = ServedAdapters(),
) -> Workload:
    """FlexLLM's case study (8.4): the arrivals of `length` recorded seconds of an Azure trace, every request
    of one shape, and mini-batches of 1,024 tokens."""
    bare = [replace(row, prompt=prompt, answer=answer) for row in trace]
    part = trace_part(
        bare,
        rate,
        settings.seconds,
        begin=begin,
        length=length,
        longest_prompt=prompt,
        longest_answer=answer,
        seed=settings.seed,
    )
    said = (
        f"{part.arrivals()} (theirs were six minutes); arrivals only, all lengths fixed: "
        f"{describe_lengths(settings, prompt, answer)}"
    )
    rows = part.scaled.rows
    title = "FlexLLM, 8.4: arrivals of the Azure trace, lengths fixed"
    return make_workload(settings, "azure-arrivals", title, rows, training, adapters, said)


def service_tiers(
    *,
    first_token: float,
    between_tokens: float,
    end_to_end: float,
    deferral: float,
    shares: tuple[float, float, float] = SHARES,
) -> tuple[Tier, Tier, Tier]:
    """Priority (bounds on the first token and between tokens), default (on the whole answer), and flex
    (only on how long training may defer it)."""
    priority, default, flex = shares
    return (
        Tier("priority", priority, SLO(first_token=first_token, between_tokens=between_tokens)),
        Tier("default", default, SLO(end_to_end=end_to_end)),
        Tier("flex", flex, SLO(deferral=deferral)),
    )


def tiers(
    settings: WorkloadSettings,
    classes: Sequence[Tier],
    *,
    rate: float,
    prompt: int = 128,
    answer: int = 32,
    training: TrainingSpec = TrainingSpec(weights=(3.0, 1.0)),
    adapters: ServedAdapters = ServedAdapters(),
) -> Workload:
    """Poisson arrivals of which exactly these shares, in random order, are in these tiers; jobs share what
    is left by weight. `settings.slo` is not used: each tier has its own."""
    rows = uniform_rows(poisson_times(rate, settings.seconds, settings.seed), prompt, answer)
    slos = assign_tiers(classes, len(rows), settings.seed)
    said = ", ".join(f"{tier.share:.0%} {tier.name} ({describe_bounds(tier.slo)})" for tier in classes)
    weights = " : ".join(f"{weight:g}" for weight in training.weights)
    made = make_workload(
        settings,
        "tiers",
        "Tiers of service, and jobs of different weight",
        rows,
        training,
        adapters,
        f"{rate:.3g} requests a second: {said}; {describe_lengths(settings, prompt, answer)}; "
        f"jobs weigh {weights}",
    )
    requests = (replace(r, slo=slo) for r, slo in zip(made.requests, slos, strict=True))
    return replace(made, requests=tuple(requests))
