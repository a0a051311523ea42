"""Part `blocking`: latency of short answers while a large batch trains, over the same when nothing does."""

import random
import time

from coserve.core.events import TokenEvent
from coserve.engine.engine import Engine
from coserve.simulate.intervals import percentile
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import Tokens, fixed_prompts, greedy
from coserve_benchmarks.drive import announced
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.place import Place
from coserve_benchmarks.ours import warm_training

_PROMPT, _ANSWER = 64, 16
_EXAMPLES = 4  # times the usual batch


def run(log: PartLog, place: Place) -> None:
    """The same requests one after the other, alone and beside training; none of them states a bound."""
    sizes = place.sizes
    engine = place.engine(4096, calibrate=True)
    prompts = fixed_prompts(sizes.requests, min(_PROMPT, sizes.prompt), place.shape.vocabulary)
    _latencies(engine, place, prompts[:2])
    idle = _latencies(engine, place, prompts)
    job = place.train(engine, "large", SavePolicy.INPUTS, _EXAMPLES * sizes.batch)
    warm_training(engine, [job])
    busy = _latencies(engine, place, prompts)
    job.cancel()
    for name, found in (("idle", idle), ("training", busy)):
        for share in (0.5, 0.99):
            log.figure(f"blocking.{name}_p{100 * share:.0f}", 1e3 * percentile(found, share), "ms")
    for share in (0.5, 0.99):
        ratio = percentile(busy, share) / percentile(idle, share)
        log.figure(f"blocking.ratio_p{100 * share:.0f}", ratio, "times", note="1 is no delay")


def _latencies(engine: Engine, place: Place, prompts: list[Tokens]) -> list[float]:
    """Seconds from each request's instant, drawn beforehand, to its last token."""
    draw, found = random.Random(0), []
    for prompt in prompts:
        due = engine.clock() + draw.expovariate(1 / place.sizes.request_gap)
        while (left := due - engine.clock()) > 0:
            if engine.scheduler.has_work:
                with announced(engine, due):
                    engine.step()
            else:
                time.sleep(left)
        key = engine.generate(prompt, sampling=greedy(_ANSWER), arrival=due).sequence.key
        while not any(_ends(event, key) for event in engine.step()):
            pass
        found.append(engine.clock() - due)
    return found


def _ends(event: object, key: int) -> bool:
    return isinstance(event, TokenEvent) and event.key == key and event.finish_reason is not None
