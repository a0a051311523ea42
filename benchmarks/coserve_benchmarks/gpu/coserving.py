"""Part `coserving`: what a job keeps of its speed beside requests at half of the capacity, within bounds."""

import time

from coserve.core.request import SLO
from coserve.engine.engine import Engine
from coserve.simulate.intervals import percentile
from coserve.simulate.replay import LoadResult
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import Workload, fixed_prompts, greedy, poisson_requests
from coserve_benchmarks.drive import serve
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.place import Place
from coserve_benchmarks.gpu.training import tokens_per_second
from coserve_benchmarks.ours import warm_training

GOAL = 0.8  # of what the job trains alone
_LOAD = 0.5  # of the capacity
_FIRST = 2.0  # seconds: the bound on a first token
_RESERVE = 12.0
_PATIENCE = 5.0  # seconds after the load, for answers that are late


def run(log: PartLog, place: Place) -> None:
    """The capacity, the job alone, then both for each bound between two tokens."""
    sizes = place.sizes
    room = 2 * sizes.together * (sizes.prompt + sizes.answer)
    engine = place.engine(room, calibrate=True, max_running=2 * sizes.together)
    capacity = _capacity(engine, place)
    log.figure("coserving.capacity", capacity, "output tokens/s", note=f"{sizes.together} prompts at once")
    job = place.train(engine, "beside", SavePolicy.EVERYTHING)
    warm_training(engine, [job])
    alone = tokens_per_second(engine, place, log.left / 6)
    log.figure("coserving.alone", alone, "trained tokens/s")
    for bound in sizes.bounds:
        if log.left < _RESERVE + sizes.load_seconds:
            log.note(f"no time was left for a bound of {1e3 * bound:.0f} ms")
            continue
        slo = SLO(first_token=_FIRST, between_tokens=bound)
        _report(log, bound, slo, _both(engine, place, capacity, slo), alone, capacity)


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


def _both(engine: Engine, place: Place, capacity: float, slo: SLO) -> LoadResult:
    sizes = place.sizes
    rate = _LOAD * capacity / sizes.answer
    requests = poisson_requests(
        rate, sizes.load_seconds, sizes.prompt, sizes.answer, place.shape.vocabulary, slo=slo
    )
    load = Workload("half", "half of the capacity", sizes.load_seconds, tuple(requests), ())
    return serve(engine, load, _PATIENCE)


def _report(log: PartLog, bound: float, slo: SLO, load: LoadResult, alone: float, capacity: float) -> None:
    name, trained = f"coserving[{1e3 * bound:.0f} ms]", load.training_rate()
    log.figure(f"{name}.training", trained, "trained tokens/s", alone, trained / alone, GOAL)
    if not load.gaps:
        log.note(f"{name}: no answer has two tokens")
        return
    log.figure(f"{name}.attainment", load.attainment(slo), "of requests with every token in time")
    log.figure(f"{name}.output", load.output_rate(), "output tokens/s", capacity)
    for share in (0.5, 0.99):
        log.figure(
            f"{name}.between_p{100 * share:.0f}", 1e3 * percentile(load.gaps, share), "ms", 1e3 * bound
        )
