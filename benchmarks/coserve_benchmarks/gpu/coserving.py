"""Part `coserving`: what a job keeps of its speed beside requests that state bounds, by load."""

import time
from dataclasses import dataclass, replace

from coserve.core.request import SLO
from coserve.engine.engine import Engine
from coserve.schedule.policies import make_policy
from coserve.simulate.intervals import percentile
from coserve.simulate.replay import LoadResult
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import Workload, fixed_prompts, greedy, poisson_requests
from coserve_benchmarks.drive import serve
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.place import Place
from coserve_benchmarks.gpu.sizes import GpuSizes
from coserve_benchmarks.gpu.training import tokens_per_second
from coserve_benchmarks.ours import warm_training

_HALF = 0.5  # of the capacity
_POLICIES = {"": "hybrid", ", concurrent": "adaptive"}  # the one alternates, the other shares where it pays
_FIRST = 2.0  # seconds: the bound on a first token
_PATIENCE = 5.0  # seconds after the load, for answers that are late


@dataclass(frozen=True, slots=True)
class _Case:
    """A bound between two tokens in seconds, a share of the capacity, and a policy by its suffix."""

    bound: float
    load: float
    policy: str

    @property
    def name(self) -> str:
        load = "" if self.load == _HALF else f", {self.load:g} of capacity"
        return f"coserving[{1e3 * self.bound:.0f} ms{self.policy}{load}]"


def run(log: PartLog, place: Place) -> None:
    """The capacity, the job alone, then both for each case; those come first that say most."""
    sizes = place.sizes
    room = 2 * sizes.together * (sizes.prompt + sizes.answer)
    scheduler = {"interruptible": True, **sizes.scheduler, "max_training_rows": sizes.window}
    engine = place.engine(room, calibrate=True, max_running=2 * sizes.together, scheduler=scheduler)
    capacity = _capacity(engine, place)
    log.figure("coserving.capacity", capacity, "output tokens/s", note=f"{sizes.together} prompts at once")
    job = place.train(engine, "beside", SavePolicy.EVERYTHING, rows=sizes.window)
    warm_training(engine, [job])
    alone = tokens_per_second(engine, place, log.left / 10)
    log.figure("coserving.alone", alone, "trained tokens/s")
    slower = engine.scheduler.cost.first.interference
    for what, factor in (("answers", slower.inference), ("training", slower.training)):
        log.figure(f"coserving.slower_{what}", factor, "times as long beside the other, as calibrated")
    for case in _cases(sizes):
        if log.left < sizes.load_seconds + _PATIENCE:
            log.note(f"no time was left for {case.name}")
            continue
        slo = SLO(first_token=_FIRST, between_tokens=case.bound)
        engine.scheduler.policy = make_policy(_POLICIES[case.policy])
        load = _both(engine, place, case.load * capacity, slo)
        _report(log, case, slo, load, alone, sizes.warm_up)


def _cases(sizes: GpuSizes) -> list[_Case]:
    """Both policies at half of the capacity with each bound, then the other loads with the first bound."""
    halves = [_Case(bound, _HALF, policy) for policy in _POLICIES for bound in sizes.bounds]
    return halves + [_Case(sizes.bounds[0], load, policy) for policy in _POLICIES for load in sizes.loads]


def _capacity(engine: Engine, place: Place) -> float:
    """Output tokens a second of prompts that come at once."""
    sizes = place.sizes
    for _ in range(2):  # the first time kernels are chosen
        prompts = fixed_prompts(sizes.together, sizes.prompt, place.shape.vocabulary)
        for prompt in prompts:
            engine.generate(prompt, sampling=greedy(sizes.answer))
        started = time.perf_counter()
        engine.run()
        seconds = time.perf_counter() - started
    return sizes.together * sizes.answer / seconds


def _both(engine: Engine, place: Place, output: float, slo: SLO) -> LoadResult:
    """Serves arrivals that ask for so many output tokens a second. Those of the warm-up, in which the
    scheduler sees how long the longest steps are, do not count."""
    sizes = place.sizes
    rate = output / sizes.answer
    requests = poisson_requests(
        rate, sizes.load_seconds, sizes.prompt, sizes.answer, place.shape.vocabulary, slo=slo
    )
    load = Workload("share", "a share of the capacity", sizes.load_seconds, tuple(requests), ())
    found = serve(engine, load, _PATIENCE)
    begun = found.started + sizes.warm_up * load.seconds
    return replace(found, answers=[answer for answer in found.answers if answer.arrival >= begun])


def _report(log: PartLog, case: _Case, slo: SLO, load: LoadResult, alone: float, warm_up: float) -> None:
    name, trained = case.name, load.training_rate(warm_up)
    note = f"`{_POLICIES[case.policy]}`: {trained:,.0f} trained tokens/s"
    log.figure(f"{name}.training", trained / alone, "of the job alone", 1.0, trained / alone, note)
    if not load.answers or not load.gaps:
        log.note(f"{name}: no answer has two tokens")
        return
    log.figure(f"{name}.attainment", load.attainment(slo), "of requests with every token in time")
    log.figure(f"{name}.output", load.output_rate(warm_up), "output tokens/s")
    for share in (0.5, 0.99):
        figure, value = f"{name}.between_p{100 * share:.0f}", 1e3 * percentile(load.gaps, share)
        log.figure(figure, value, "ms", 1e3 * case.bound)
