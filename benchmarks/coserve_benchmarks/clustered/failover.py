"""Rows `failover.…`: an answer under way while the worker dies that alone has a block and its pages."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Final

from coserve.core.request import SamplingParams
from coserve_benchmarks.clustered.meeting import RATE
from coserve_benchmarks.clustered.workers import engine_on, local_workers
from coserve_benchmarks.ours import Bench

_PROMPT: Final = 256
_TOKENS: Final = 48
_KILLED: Final = 16  # tokens of the answer before the kill


def run(bench: Bench, model: Path) -> None:
    """Three workers, of which two have a block each; one of these is killed. The third loads the block, and
    the pages that were lost are computed again."""
    prompt = [token % bench.shape.vocabulary for token in range(3, 3 + _PROMPT)]
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    with local_workers(3, RATE) as workers:
        settings = {"cluster_blocks": 2, "cache_tokens": 2048, "calibrate": False}
        with engine_on(workers, model, **settings) as (engine, front):
            whole = engine.generate(prompt, None, sampling).result()
            answer = engine.generate(prompt, None, sampling)
            times, killed = [time.perf_counter()], False
            while len(answer.tokens) < _TOKENS:
                before = len(answer.tokens)
                engine.step()
                times += [time.perf_counter()] * (len(answer.tokens) - before)
                if len(answer.tokens) >= _KILLED and not killed:
                    killed = True
                    status = front.fleet.status()
                    next(worker for worker in workers if status[worker.address] == [0]).kill()
    gaps = [after - earlier for earlier, after in pairwise(times[1:])]
    changed = sum(one != other for one, other in zip(answer.tokens, whole.tokens, strict=True))
    bench.results.row("failover.changed", changed, note=f"measured: of {_TOKENS} tokens, those that differ")
    note = "measured: seconds without a token, in which a block is loaded and its pages are computed again"
    bench.results.row("failover.gap_s", max(gaps), note=note)
