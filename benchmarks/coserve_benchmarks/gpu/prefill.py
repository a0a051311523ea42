"""Part `prefill`: prompts of many lengths, beside the operations that they take."""

import time
from statistics import median

from coserve.engine.engine import Engine
from coserve.workload.requests import Tokens, fixed_prompts, greedy
from coserve_benchmarks.floors import prefill_flops
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.place import Place

_RESERVE = 6.0
_ROUNDS = 3


def run(log: PartLog, place: Place) -> None:
    """Each number of prompts of each length."""
    sizes = place.sizes
    engine = place.engine(2 * max(count * length for count, length in sizes.prompts))
    for count, length in sizes.prompts:
        if log.left < _RESERVE:
            log.note(f"no time was left for {count} prompts of {length} tokens")
            continue
        prompts = fixed_prompts(count, length, place.shape.vocabulary)
        seconds = median([_answered(engine, prompts) for _ in range(_ROUNDS + 1)][1:])
        floor = prefill_flops(place.shape, count, length) / place.rates.matrix_rate
        log.seconds(f"prefill[{count}x{length}]", seconds, floor, note="operations at the measured rate")
        log.figure(f"prefill.rate[{count}x{length}]", count * length / seconds, "tokens/s")


def _answered(engine: Engine, prompts: list[Tokens]) -> float:
    """Seconds until each prompt has its one token."""
    for prompt in prompts:
        engine.generate(prompt, sampling=greedy(1))
    started = time.perf_counter()
    engine.run()
    return time.perf_counter() - started
