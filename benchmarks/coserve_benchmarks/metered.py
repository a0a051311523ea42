"""Group `metered`: answers and training on a device of an H200's seconds, with the real scheduler and host.

There is no model: an executor sleeps for as long as the device would take (`metered_machine.py`). What is
measured is whether plans keep bounds on real time, how much training is left, and how much of the host's
time the device waits for.
"""

import gc
from bisect import bisect_right
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

from coserve.core.request import SLO, Request
from coserve.core.sequence import Sequence
from coserve.schedule.segments import inference_plan
from coserve.schedule.step_costs import RARE_DELAY
from coserve.simulate.intervals import percentile
from coserve.simulate.jitter import Jitter
from coserve.simulate.machine import MachineSettings
from coserve.simulate.replay import LoadResult, replay
from coserve.workload.requests import (
    ENDLESS,
    TimedJob,
    TimedRequest,
    Workload,
    fixed_prompts,
    poisson_requests,
)
from coserve_benchmarks.gpu.sizes import GpuSizes
from coserve_benchmarks.gpu_times import GpuTimes
from coserve_benchmarks.metered_machine import CollectedStep, MeteredMachine
from coserve_benchmarks.ours import Bench

CAPACITY: Final = 4217.0  # output tokens/s: `coserving.capacity` of docs/results/gpu.md
ROWS: Final = 32  # of the steps whose host time is measured
_FIRST: Final = 2.0  # seconds: the bound on a first token
_WARM_UP: Final = 1 / 3  # of a load's time
_PATIENCE: Final = 5.0  # seconds after the load, for answers that are late
_JITTER: Final = Jitter(0.01, share=0.0)  # of the device: long steps are the host's, which is real
_SIZES: Final = GpuSizes()
_VOCABULARY: Final = 1000
_SETTLED: Final = 20  # steps until all rows decode, of the host's time
_STEPS: Final = 100  # that are timed then
_SPREAD: Final = "least and greatest of the seeds"
POLICY: Final = "hybrid"


@dataclass(frozen=True, slots=True)
class Case:
    """A share of the capacity, and the bound between two tokens in seconds."""

    name: str
    load: float
    bound: float


CASES: Final = (Case("50ms", 0.5, 0.05), Case("20ms", 0.5, 0.02), Case("fifth", 0.2, 0.05))


def run(bench: Bench, policy: str = POLICY) -> None:
    """Each case from several seeds: the least attainment and the median of training, as a share of what the
    job trains alone. Then the seconds for which the device waits in steps of 32 rows beside training."""
    results, settings = bench.results, bench.settings
    alone = serve(policy, 0, settings.metered_seconds, SLO(), 0.0).load.training_rate(_WARM_UP)
    results.figure("metered.alone", alone, "trained tokens/s")
    for case in CASES:
        slo = SLO(first_token=_FIRST, between_tokens=case.bound)
        runs = [
            serve(policy, seed, settings.metered_seconds, slo, case.load) for seed in range(settings.rounds)
        ]
        loads = [run.load for run in runs]
        kept = [load.attainment(slo) for load in loads]
        shares = [load.training_rate(_WARM_UP) / alone for load in loads]
        name = f"metered.{case.name}"
        results.row(f"{name}.attainment", min(kept), (min(kept), max(kept)), _note(case), _SPREAD)
        results.row(f"{name}.training", median(shares), (min(shares), max(shares)), spread_is=_SPREAD)
        results.figure(f"{name}.most", most_training(case), "of training alone, by arithmetic")
        gaps = [gap for load in loads for gap in load.gaps]
        for share in (0.5, 0.99):
            figure = f"{name}.between_p{100 * share:.0f}"
            results.figure(figure, 1e3 * percentile(gaps, share), "ms")
        own = [run.own.attainment(slo) for run in runs]
        results.figure(
            f"{name}.attainment_of_host",
            min(own),
            "share without the delays of the system",
            (min(own), max(own)),
        )
        results.figure(f"{name}.system_late", 1e3 * max(run.held_up for run in runs), "ms in one step")
        results.figure(f"{name}.host_late", 1e3 * max(run.late for run in runs), "ms in one step")
        output = median(load.output_rate(_WARM_UP) for load in loads)
        results.figure(f"{name}.output", output, "tokens/s")
    waits = {ahead: [_host(policy, seed, ahead) for seed in range(settings.rounds)] for ahead in (1, 0)}
    note = f"ms for which the device waits for the host, a step of {ROWS} rows beside training"
    results.row("metered.host", median(waits[1]), (min(waits[1]), max(waits[1])), note, _SPREAD)
    results.figure(
        "metered.host.one_at_a_time", median(waits[0]), "ms a step", (min(waits[0]), max(waits[0]))
    )


def most_training(case: Case) -> float:
    """The share of the device that answers leave to training where each step takes as long as the bound
    allows: one row for each answer under way a step, and each prompt in the pass of such rows."""
    rate = case.load * CAPACITY / _SIZES.answer
    rows = max(round(rate * _SIZES.answer * case.bound), 1)
    asked, times = Request("answer", (0,) * (_SIZES.prompt + _SIZES.answer // 2)), GpuTimes()
    decodes = [(Sequence(1 + row, asked), len(asked.prompt) - 1, 1) for row in range(rows)]
    prompt = Sequence(0, Request("prompt", (0,) * _SIZES.prompt)), 0, _SIZES.prompt
    step, mixed = (times.predict(inference_plan(plan)) for plan in (decodes, [*decodes, prompt]))
    return 1.0 - step / case.bound - rate * (mixed - step)


def _note(case: Case) -> str:
    """A sentence on a case."""
    return (
        f"share of answers with every token within {1e3 * case.bound:.0f} ms at {case.load:g} of the capacity"
    )


@dataclass(frozen=True, slots=True)
class MeteredLoad:
    """A load; its `own` times, those without the delays that the system caused; and the longest seconds of
    such a delay (`held_up`) and of the host's own (`late`) in one step."""

    load: LoadResult
    own: LoadResult
    held_up: float
    late: float


def serve(policy: str, seed: int, seconds: float, slo: SLO, share: float) -> MeteredLoad:
    """A load at a share of the capacity, beside a job without end: `seconds`, and before them a warm-up whose
    answers do not count, in which the scheduler sees how long the longest steps are."""
    whole = seconds / (1 - _WARM_UP)
    requests: list[TimedRequest] = []
    if share:
        rate = share * CAPACITY / _SIZES.answer
        requests = poisson_requests(rate, whole, _SIZES.prompt, _SIZES.answer, _VOCABULARY, seed, slo)
    workload = Workload("metered", "", whole, tuple(requests), (_job(),))
    machine = _machine(policy, seed)
    gc.collect()
    gc.freeze()  # as an engine's process does: a walk over all that is imported would take 0.2 s
    load = replay(machine, workload, _PATIENCE)
    begun = load.started + _WARM_UP * whole
    load = replace(load, answers=[answer for answer in load.answers if answer.arrival >= begun])
    steps = [step for step in machine.executor.steps if step.seen >= begun]
    ends = [step.seen for step in steps]

    def without(stamp: float) -> float:
        place = bisect_right(ends, stamp) - 1
        return stamp - steps[place].held_up if place >= 0 else stamp

    answers = [replace(one, tokens=[*map(without, one.tokens)]) for one in load.answers]
    longest = [max((times(step) for step in steps), default=0.0) for times in (_held_up, _late)]
    return MeteredLoad(load, replace(load, answers=answers), longest[0], longest[1])


def _held_up(step: CollectedStep) -> float:
    return step.held_up


def _late(step: CollectedStep) -> float:
    return step.seen - step.ended - step.held_up


def _job() -> TimedJob:
    example = (0,) * _SIZES.length
    return TimedJob(0.0, "job", (example,) * _SIZES.batch, _SIZES.batch, epochs=ENDLESS, rows=_SIZES.window)


def _machine(policy: str, seed: int, plans_ahead: int = 1) -> MeteredMachine:
    room = 2 * _SIZES.together * (_SIZES.prompt + _SIZES.answer)
    scheduler: dict[str, Any] = {
        "interruptible": True,
        "max_running": 2 * _SIZES.together,
        **_SIZES.scheduler,
    }
    scheduler |= {"max_training_rows": _SIZES.window, "rare_delay": RARE_DELAY}
    settings = MachineSettings(room, jitter=_JITTER, known=0, scheduler=scheduler)
    return MeteredMachine(policy, GpuTimes(), settings, seed, plans_ahead)


def _host(policy: str, seed: int, plans_ahead: int) -> float:
    """Milliseconds of a step for which the device waits, while `ROWS` answers have a row in each."""
    machine = _machine(policy, seed, plans_ahead)
    machine.start(_job())
    slo = SLO(first_token=_FIRST, between_tokens=CASES[0].bound)
    for prompt in fixed_prompts(ROWS, _SIZES.prompt, _VOCABULARY, seed):
        machine.ask(TimedRequest(0.0, prompt, 2 * (_STEPS + _SETTLED), slo=slo), machine.clock())
    for _ in range(_SETTLED):
        machine.step()
    before = machine.executor.idle
    for _ in range(_STEPS):
        machine.step()
    return 1e3 * (machine.executor.idle - before) / _STEPS
