"""Rows `remote.…`: a step whose executor is in a process of its own, over one in the engine's process; rows
`ranks.…`: one over several ranks, over that."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from coserve.engine.engine import Engine
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import fixed_prompts, greedy
from coserve_benchmarks.ours import Bench, make_engine, start_training
from coserve_benchmarks.timing import alternate, speedup

_KINDS: Final[dict[str, dict[str, Any]]] = {
    "local": {},
    "remote": {"executor": "remote"},
    "one_at_a_time": {"executor": "remote", "async_scheduling": False},
}
_SEQUENCES: Final = {"decode_one": 1, "decode_many": 16}
STEPS: Final = 24  # decode steps of a round
_TRAINING_STEPS: Final = 2  # optimizer steps of a round


def run(bench: Bench, ranks: int = 1) -> None:
    """Decode steps of one and of many sequences, and training, in turn: all engines are there all the time,
    and all but one are idle."""
    kinds = _KINDS if ranks == 1 else {"local": {}, "ranks": {"tensor_parallel": ranks}}
    keep = SavePolicy.EVERYTHING if ranks == 1 else SavePolicy.INPUTS  # what ranks keep
    engines = {kind: make_engine(bench, calibrate=False, **how) for kind, how in kinds.items()}
    table = "remote" if ranks == 1 else "ranks"
    for key, count in _SEQUENCES.items():
        steps = {kind: decode_step(bench, engine, count) for kind, engine in engines.items()}
        _row(bench, f"{table}.{key}", steps)
    _row(bench, f"{table}.training", {kind: _train(bench, engine, keep) for kind, engine in engines.items()})


def _row(bench: Bench, key: str, contestants: dict[str, Callable[[], float]]) -> None:
    times = alternate(contestants, bench.settings.rounds, bench.machine.threads)
    for kind, taken in times.items():
        spread = (taken.low * 1e3, taken.high * 1e3)
        bench.results.figure(f"{key}.{kind}", taken.median * 1e3, "ms a step", spread)
    note = "seconds of a step whose executor is in a process of its own, over those in the engine's"
    rows = {
        "remote": ("", note),
        "one_at_a_time": ("_one_at_a_time", f"{note}; no plan ahead"),
        "ranks": ("", "seconds of a step over ranks, over those of one in the engine's process"),
    }
    for kind in [kind for kind in times if kind in rows]:
        suffix, said = rows[kind]
        bench.results.ratio(key + suffix, speedup(times["local"], times[kind]), said)


def decode_step(
    bench: Bench, engine: Engine, count: int, during: AbstractContextManager[object] = nullcontext()
) -> Callable[[], float]:
    """Seconds of a decode step of `count` sequences, planning and all; the steps run in `during`."""
    prompts = fixed_prompts(count, 32, bench.shape.vocabulary, bench.settings.seed)

    def run() -> float:
        answers = [engine.generate(prompt, sampling=greedy(STEPS + 8)) for prompt in prompts]
        while any(not answer.tokens for answer in answers):
            engine.step()
        started = time.perf_counter()
        with during:
            for _ in range(STEPS):
                engine.step()
        taken = time.perf_counter() - started
        engine.run()
        return taken / STEPS

    return run


def _train(bench: Bench, engine: Engine, keep: SavePolicy) -> Callable[[], float]:
    """Seconds of an optimizer step with all that leads to it."""

    def run() -> float:
        job = start_training(engine, bench, "bench", keep)
        while not job.history:
            engine.step()
        started, before = time.perf_counter(), len(job.history)
        while len(job.history) < before + _TRAINING_STEPS:
            engine.step()
        taken = time.perf_counter() - started
        job.cancel()
        engine.run()
        return taken / _TRAINING_STEPS

    return run
