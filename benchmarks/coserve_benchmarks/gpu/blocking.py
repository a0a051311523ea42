"""Part `blocking`: latency of short answers while a large batch trains, over the same when nothing does."""

from functools import partial

from coserve.simulate.intervals import percentile
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import fixed_prompts
from coserve_benchmarks.blocking import answer_latencies
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
    latencies = partial(answer_latencies, engine, seed=0, gap=sizes.request_gap, answer=_ANSWER)
    latencies(prompts[:2])
    idle = latencies(prompts)
    job = place.train(engine, "large", SavePolicy.INPUTS, _EXAMPLES * sizes.batch)
    warm_training(engine, [job])
    busy = latencies(prompts)
    job.cancel()
    for name, found in (("idle", idle), ("training", busy)):
        for share in (0.5, 0.99):
            log.figure(f"blocking.{name}_p{100 * share:.0f}", 1e3 * percentile(found, share), "ms")
    for share in (0.5, 0.99):
        ratio = percentile(busy, share) / percentile(idle, share)
        log.figure(f"blocking.ratio_p{100 * share:.0f}", ratio, "times", note="1 is no delay")
