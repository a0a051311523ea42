"""The workloads that policies are judged on: those of the papers, general ones, and a recorded trace.

Each function gives a `Workload`: the same for the same arguments on every machine. Its `scale` says what it
was made of here and what its paper has in that place.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from coserve.core.request import SLO
from coserve.workload.arrivals import gamma_times, poisson_times, spread_times, steady_times
from coserve.workload.mixes import (
    ServedAdapters,
    Tier,
    TrainingSpec,
    WorkloadSettings,
    asking,
    bounds,
    make_job,
    make_requests,
    make_workload,
    of_one_shape,
    serving,
    shared_out,
)
from coserve.workload.requests import Workload
from coserve.workload.traces import TraceRow, segment

SHARES: Final = (0.3, 0.4, 0.3)  # of requests in three tiers of service
MLP: Final = ("gate_proj", "up_proj", "down_proj")  # the linears that FlexLLM adapts


def report(
    given: WorkloadSettings,
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
    rows = of_one_shape(steady_times(every, given.seconds), prompt, answer)
    once = replace(training, examples=examples, epochs=1)
    jobs = [make_job(given, once, n, at) for n, at in enumerate(steady_times(tune_every, given.seconds))]
    scale = (
        f"a request every {every:.3g} s (there 0.1), {examples} examples in batches of {training.batch} "
        f"every {tune_every:.3g} s (there 512 in batches of 32 every 20), {asking(given, prompt, answer)}, "
        f"{serving(adapters)} (there 32 of rank 32)"
    )
    return Workload(
        "report",
        "Multi-LoRA report, table 5.1: steady requests, bursts of fine-tuning",
        given.seconds,
        make_requests(given, rows, adapters),
        tuple(jobs),
        adapters.served,
        scale,
    )


def fineinfer(
    given: WorkloadSettings,
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
    deferring = replace(given, slo=replace(given.slo, deferral=deferral))
    rows = of_one_shape(spread_times(spread, given.seconds, given.seed), prompt, answer)
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
        f"{said}, {asking(given, prompt, answer)}",
    )


def flexllm(
    given: WorkloadSettings,
    *,
    rate: float,
    prompt: int = 256,
    answer: int = 64,
    training: TrainingSpec = TrainingSpec(batch=1, length=1024, rank=8, targets=MLP),
    adapters: ServedAdapters = ServedAdapters(),
) -> Workload:
    """FlexLLM's (8.1): `rate` requests a second, and long examples that train the linears of the MLP."""
    rows = of_one_shape(poisson_times(rate, given.seconds, given.seed), prompt, answer)
    said = (
        f"{rate:.3g} requests a second (there up to 10), {asking(given, prompt, answer)} (there 256 and 64)"
    )
    return make_workload(
        given,
        "flexllm",
        "FlexLLM, 8.1: long prompts beside 1,024-token examples",
        rows,
        training,
        adapters,
        f"{said}, examples of {training.length} tokens (there 1,024)",
    )


def poisson(
    given: WorkloadSettings,
    *,
    rate: float,
    prompt: int = 128,
    answer: int = 32,
    training: TrainingSpec = TrainingSpec(),
    adapters: ServedAdapters = ServedAdapters(),
) -> Workload:
    """Requests that know nothing of each other."""
    rows = of_one_shape(poisson_times(rate, given.seconds, given.seed), prompt, answer)
    said = f"{rate:.3g} requests a second, {asking(given, prompt, answer)}"
    return make_workload(given, "poisson", "Poisson arrivals", rows, training, adapters, said)


def bursty(
    given: WorkloadSettings,
    *,
    rate: float,
    variation: float = 3.0,
    prompt: int = 128,
    answer: int = 32,
    training: TrainingSpec = TrainingSpec(),
    adapters: ServedAdapters = ServedAdapters(),
) -> Workload:
    """Requests in bursts: Gamma gaps with this coefficient of variation (a Poisson process has 1)."""
    rows = of_one_shape(gamma_times(rate, given.seconds, variation, given.seed), prompt, answer)
    said = (
        f"{rate:.3g} requests a second on average, gaps with a coefficient of variation of {variation:.3g}, "
        f"{asking(given, prompt, answer)}"
    )
    return make_workload(given, "bursty", "Bursts: Gamma arrivals", rows, training, adapters, said)


def azure(
    given: WorkloadSettings,
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
    """`length` recorded seconds of an Azure trace from `begin` on: arrivals, prompts and answers, scaled.

    `arrivals.rising_and_falling` finds a beginning like FlexLLM's.
    """
    part = segment(
        trace,
        rate,
        given.seconds,
        begin=begin,
        length=length,
        longest_prompt=longest_prompt,
        longest_answer=longest_answer,
        seed=given.seed,
    )
    rows = part.scaled.rows
    said = f"{part.arrivals()}, {part.lengths()}"
    title = "Azure conversations, 2023"
    return make_workload(given, "azure", title, rows, training, adapters, said, exact=True)


def azure_arrivals(
    given: WorkloadSettings,
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
    part = segment(
        bare,
        rate,
        given.seconds,
        begin=begin,
        length=length,
        longest_prompt=prompt,
        longest_answer=answer,
        seed=given.seed,
    )
    said = (
        f"{part.arrivals()} (theirs were six minutes); arrivals only, all lengths fixed: "
        f"{asking(given, prompt, answer)}"
    )
    rows = part.scaled.rows
    title = "FlexLLM, 8.4: arrivals of the Azure trace, lengths fixed"
    return make_workload(given, "azure-arrivals", title, rows, training, adapters, said)


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
    given: WorkloadSettings,
    classes: Sequence[Tier],
    *,
    rate: float,
    prompt: int = 128,
    answer: int = 32,
    training: TrainingSpec = TrainingSpec(weights=(3.0, 1.0)),
    adapters: ServedAdapters = ServedAdapters(),
) -> Workload:
    """Poisson arrivals of which exactly these shares, in random order, are in these tiers; jobs share what
    is left by weight. `given.slo` is not used: each tier has its own."""
    rows = of_one_shape(poisson_times(rate, given.seconds, given.seed), prompt, answer)
    slos = shared_out(classes, len(rows), given.seed)
    said = ", ".join(f"{tier.share:.0%} {tier.name} ({bounds(tier.slo)})" for tier in classes)
    weights = " : ".join(f"{weight:g}" for weight in training.weights)
    made = make_workload(
        given,
        "tiers",
        "Tiers of service, and jobs of different weight",
        rows,
        training,
        adapters,
        f"{rate:.3g} requests a second: {said}; {asking(given, prompt, answer)}; jobs weigh {weights}",
    )
    requests = (replace(r, slo=slo) for r, slo in zip(made.requests, slos, strict=True))
    return replace(made, requests=tuple(requests))
