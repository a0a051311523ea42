"""Row `blocking.ratio`: latency of short answers while a large batch trains."""

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from coserve.core.events import TokenEvent
from coserve.engine.engine import Engine
from coserve.simulate.driven import announced
from coserve.simulate.intervals import percentile
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import Tokens, fixed_prompts, greedy
from coserve_benchmarks.inference import floor_seconds
from coserve_benchmarks.intervals import interval
from coserve_benchmarks.ours import Bench, make_engine, start_training, warm_training
from coserve_benchmarks.timing import OF_REQUESTS


def run(bench: Bench) -> None:
    """The 99th percentile of latency beside training over the same when idle; no request states a bound."""
    settings, results = bench.settings, bench.results
    prompts = fixed_prompts(
        settings.blocking_requests, settings.blocking_prompt, bench.shape.vocabulary, settings.seed
    )
    engine = make_engine(bench)
    latencies = partial(
        answer_latencies,
        engine,
        seed=settings.seed,
        gap=settings.blocking_gap,
        answer=settings.blocking_answer,
    )
    latencies(prompts[:2])
    idle = latencies(prompts)
    job = start_training(
        engine, bench, "large", SavePolicy.INPUTS, settings.blocking_batch, settings.blocking_length
    )
    warm_training(engine, [job])
    busy = latencies(prompts)
    job.cancel()

    def floor() -> float:
        return floor_seconds(bench, 1, settings.blocking_prompt, settings.blocking_answer)

    for name, found in (("idle", idle), ("training", busy)):
        middle, tail = (interval(partial(np.quantile, q=share), found) for share in (0.5, 0.99))
        results.figure(f"blocking.{name}_p50", percentile(found, 0.5), "seconds", middle)
        results.figure(f"blocking.{name}_p99", percentile(found, 0.99), "seconds", tail, floor)
        results.series(f"blocking.{name}", found)
    note = f"{len(idle)} requests one after another, without training and beside it"
    ratio = percentile(busy, 0.99) / percentile(idle, 0.99)
    results.row("blocking.ratio", ratio, interval(_tail_ratio, busy, idle), note, OF_REQUESTS)


def _tail_ratio(busy: Any, idle: Any, axis: int) -> Any:
    return np.quantile(busy, 0.99, axis=axis) / np.quantile(idle, 0.99, axis=axis)


def answer_latencies(
    engine: Engine, prompts: Sequence[Tokens], seed: int, gap: float, answer: int
) -> list[float]:
    """Seconds from each request's instant to the last of its `answer` tokens. The instants are drawn
    beforehand, `gap` seconds apart on average, so they fall anywhere in a training step."""
    draw = random.Random(seed)
    found = []
    for prompt in prompts:
        due = engine.clock() + draw.expovariate(1 / gap)
        while (left := due - engine.clock()) > 0:
            if engine.scheduler.has_work:
                with announced(engine, partial(_at, due)):
                    engine.step()
            else:
                time.sleep(left)
        handle = engine.generate(prompt, sampling=greedy(answer), arrival=due)
        while not any(_ends(event, handle.sequence.key) for event in engine.step()):
            pass
        found.append(engine.clock() - due)
    return found


def _at(due: float, _: float) -> float:
    """The `Pressing` of a request that bears no step."""
    return due


def _ends(event: object, key: int) -> bool:
    return isinstance(event, TokenEvent) and event.key == key and event.finish_reason is not None
