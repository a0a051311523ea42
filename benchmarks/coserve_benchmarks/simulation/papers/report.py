"""The multi-LoRA report's table 5.2: enhanced temporal sharing beside temporal sharing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from coserve.core.request import SLO
from coserve.simulate.jitter import Jitter
from coserve.simulate.machine import MachineSettings, SimulatedMachine
from coserve.simulate.replay import LoadResult, replay
from coserve.simulate.times import WeightedTimes
from coserve.workload.requests import ServedAdapters, Workload
from coserve_benchmarks.mixes import TrainingSpec, WorkloadSettings
from coserve_benchmarks.policies import traffic
from coserve_benchmarks.simulation.papers.statement import FigureTable, PaperResult, Say, Statement, size

ENHANCED: Final = "enhanced-temporal:64,5"
TEMPORAL: Final = {n: f"temporal:{n},batch=64,delay=5" for n in (5, 10, 20)}
OURS: Final = ("hybrid", "adaptive")
_LAYERS: Final = 24  # of GPT-2 Medium
_EVERY, _TUNE_EVERY, _EXAMPLES = 0.1, 20.0, 512  # table 5.1
_PROMPT, _ANSWER = 128, 128
_OFFERED: Final = (
    12_324  # tokens/s: what temporal sharing trained at most, taken to be all that was asked for
)
_BATCH_SECONDS: Final = 6.18 - 5.0 / 2  # its mean latency, less half of the delay in which a batch forms
_TRAINED: Final = 9_071  # tokens/s in the time that batches leave
_TIGHT, _LOOSE = 10.0, 60.0  # seconds of their objectives


@dataclass(frozen=True, slots=True)
class Column:
    """A column of table 5.2: mean latency, seconds, shares within 10 s and a minute, and tokens/s trained."""

    latency: float
    tight: float
    loose: float
    training: float

    @classmethod
    def of(cls, load: LoadResult) -> "Column":
        """Of a load; requests without an answer are within neither."""
        latencies = [answer.latency for answer in load.answers if answer.tokens]
        tight, loose = (
            sum(one <= bound for one in latencies) / len(load.answers) for bound in (_TIGHT, _LOOSE)
        )
        return cls(fmean(latencies), tight, loose, load.training_rate())


THERE: Final = {
    ENHANCED: Column(6.18, 1.0, 1.0, 9071),
    TEMPORAL[5]: Column(38.98, 0.0, 0.8308, 12324),
    TEMPORAL[10]: Column(12.96, 0.2476, 0.9737, 9852),
    TEMPORAL[20]: Column(12.85, 0.2612, 0.9612, 9480),
}


def times() -> WeightedTimes:
    """Seconds of their steps, from two figures of the table's first column: a batch takes
    `_BATCH_SECONDS` whatever its size, and training alone is as fast as the time that batches leave asks
    for."""
    left = 1 - _BATCH_SECONDS / (5.0 + _EVERY)  # of the time; a batch leaves 5 s after its first request came
    row = left / _TRAINED
    step = _BATCH_SECONDS / _ANSWER
    weights = {
        "step": 0.0, "forward_layers": step, "forward_rows": row / 3, "window_rows": row / 3,
        "prefill_layers": 0.0, "tail_rows": 0.0, "decode_context": 0.0, "forward_attention": 0.0,
        "adapters": 0.0, "windows": 0.0, "backward_layers": 0.0, "backward_rows": 2 * row / 3,
        "backward_attention": 0.0, "loss_rows": 0.0, "updates": 0.0,
    }  # fmt: skip
    return WeightedTimes(weights, _LAYERS)


def workload(seconds: float) -> Workload:
    """Table 5.1's: ten requests a second for 32 adapters, and a job of 512 examples every 20 s."""
    length = round(_OFFERED * _TUNE_EVERY / _EXAMPLES)
    return traffic.report(
        WorkloadSettings(50257, seconds, SLO()), every=_EVERY, tune_every=_TUNE_EVERY, examples=_EXAMPLES,
        prompt=_PROMPT, answer=_ANSWER,
        training=TrainingSpec(batch=32, length=length, rank=32, rows=32 * length),
        adapters=ServedAdapters(32, 32),
    )  # fmt: skip


def run(quick: bool, say: Say) -> PaperResult:
    """The four columns, and those of coserve's own policies with a bound of 10 s on each answer."""
    load, device = workload(60.0 if quick else 300.0), times()
    settings = MachineSettings(1 << 17, jitter=Jitter(0.02, 0.0), scheduler={"max_running": 64})
    bounded = replace(load, requests=tuple(replace(one, slo=SLO(end_to_end=_TIGHT)) for one in load.requests))
    found = {}
    for policy in (*THERE, *OURS):
        say(f"report: {policy}")
        own = bounded if policy in OURS else load
        machine = replace(settings, scheduler=settings.scheduler | {"interruptible": policy in OURS})
        found[policy] = Column.of(replay(SimulatedMachine(policy, device, machine), own, patience=120.0))
    rows = tuple(
        (f"`{name}`", f"{one.latency:.2f}", f"{one.tight:.1%}", f"{one.loose:.1%}", f"{one.training:,.0f}")
        for name, one in found.items()
    )
    table = FigureTable(
        "Table 5.2, simulated; `hybrid` and `adaptive` with a bound of 10 s on each answer",
        ("policy", "mean latency, s", "within 10 s", "within 1 min", "fine-tuning tokens/s"),
        rows,
    )
    return PaperResult(
        "Multi-LoRA report (EPFL), tables 5.1 and 5.2",
        "Ten requests a second for 32 adapters, a job of 512 examples every 20 s, batches of at most 64 "
        "requests or 5 s. Two figures of the first column give the seconds of a step there (a batch of "
        f"requests takes {_BATCH_SECONDS:.3g} s, and training alone makes "
        f"{_TRAINED / (1 - _BATCH_SECONDS / (5.0 + _EVERY)):,.0f} tokens/s), the other columns follow from "
        f"the schedule. Examples of {round(_OFFERED * _TUNE_EVERY / _EXAMPLES)} tokens make the 12,324 "
        f"tokens/s that temporal sharing trained; prompts and answers of {_PROMPT} tokens and "
        f"{len(load.requests) * _EVERY:g} s of load are assumed.",
        (table,),
        [*_statements(found)],
    )


def _statements(found: dict[str, Column]) -> Iterator[Statement]:
    enhanced = found[ENHANCED]
    yield size("ETS: mean latency (a figure that steps are from)", 6.18, enhanced.latency, unit=" s")
    yield size("ETS: within 10 s", 100, 100 * enhanced.tight, unit=" %")
    for n, policy in TEMPORAL.items():
        there, here = THERE[policy], found[policy]
        ratio = there.latency / THERE[ENHANCED].latency
        yield size(
            f"TS ({n}): mean latency over that of ETS",
            ratio,
            here.latency / enhanced.latency,
            "latencies of a line that grows depend on how long the load lasts, which is not stated",
            " times",
            neutral=1.0,
        )
    for n, policy in TEMPORAL.items():
        yield size(
            f"TS ({n}): within 10 s",
            100 * THERE[policy].tight,
            100 * found[policy].tight,
            "requests that came in the seconds of a job are late; how many these are depends on the length "
            "of a job, which is not stated",
            " %",
        )
    for n, policy in TEMPORAL.items():
        yield size(
            f"TS ({n}): fine-tuning over that of ETS",
            THERE[policy].training / THERE[ENHANCED].training,
            found[policy].training / enhanced.training,
            "temporal sharing also trains whenever nobody waits here, and so all that is asked for",
            " times",
            neutral=1.0,
        )
