"""`coserve bench ranks`: the whole table."""

import gc
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from coserve.config import EngineConfig
from coserve.core.request import SamplingParams
from coserve.engine.engine import Engine
from coserve.executors.executor import ReadMemory
from coserve.executors.remote import RemoteExecutor
from coserve.plan.link_trial import measured_link
from coserve.workload.requests import fixed_prompts
from coserve_benchmarks.folder import save_shape
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.ranks.bubbles import fleet_of_stages, measure_bubbles
from coserve_benchmarks.ranks.candidates import (
    RANKS,
    Sizes,
    cases_of,
    measure_candidates,
    ratios,
    replicates_all,
    seconds_of,
    spearman,
)
from coserve_benchmarks.ranks.failover import HOW, measure_failover
from coserve_benchmarks.results import Bar

GROUPS: Final = ("memory", "host", "plans", "pipeline", "failover")
BARS: Final[dict[str, Bar | None]] = {
    "tp.memory_per_rank[4]": Bar(0.30, at_most=True),
    "tp.host[2]": Bar(1.2, at_most=True),
    "tp.host[4]": Bar(1.2, at_most=True),
    "plan.vs_worst": Bar(1.3),
    "plan.vs_replicate_all": Bar(1.0),
    "plan.spearman": Bar(0.8),
    "pipeline.bubble_filled": Bar(0.8),
    "failover.lost": Bar(0, at_most=True),
    "failover.gap": Bar(10.0, at_most=True),
}
_FULL: Final = Sizes(rows=512, width=1024, inner=16, candidates=8, rounds=7)
_QUICK: Final = Sizes(rows=128, width=256, inner=8, candidates=4, rounds=2)
_ANSWERS, _PROMPT, _SETTLED = (
    4,
    16,
    3,
)  # rows of the host's steps, tokens of a prompt, steps until all decode
_SPREAD: Final = "least and greatest round"


def run_ranks(
    quick: bool = False, only: Collection[str] | None = None, json_path: str | Path | None = None
) -> dict[str, Any]:
    """Measures the rows of some groups (all, by default) and returns what `--json` writes. Raises ConfigError
    for an unknown group."""
    groups = GROUPS if only is None else tuple(only)
    bench = begin("tiny", quick, groups, GROUPS, json_path, BARS)
    with tempfile.TemporaryDirectory(prefix="coserve-bench-ranks-") as name:
        shape = replace(bench.shape, name="tiny-4", groups=4)  # which four ranks divide
        folder = save_shape(shape, Path(name))
        runs: dict[str, Callable[[], object]] = {
            "memory": lambda: _memory(bench, folder, quick),
            "host": lambda: _host(bench, folder, quick),
            "plans": lambda: _plans(bench, quick),
            "pipeline": lambda: _pipeline(bench),
            "failover": lambda: _failover(bench, folder, Path(name), quick),
        }
        run_groups(bench, groups, runs)
    found: dict[str, Any] = bench.results.as_dict()
    return found


@contextmanager
def engine_of(folder: Path, ranks: int) -> Iterator[Engine]:
    """An engine of so many ranks, or with one in a process of its own."""
    config = EngineConfig(calibrate=False, cache_tokens=2048, prefix_sharing=False, executor="remote")
    engine = Engine(folder, replace(config, tensor_parallel=ranks))
    try:
        yield engine
    finally:
        assert isinstance(engine.executor, RemoteExecutor)
        engine.executor.close()


def _memory(bench: Bench, folder: Path, quick: bool) -> None:
    """The base's bytes of a rank over those of one rank alone; they are counted, and the same in each run."""
    held = {}
    for ranks in (1, 4) if quick else (1, 2, 4):
        with engine_of(folder, ranks) as engine:
            held[ranks] = engine.executor.call(ReadMemory()).base
        bench.results.figure(f"tp.base[{ranks}]", held[ranks], "bytes of the base that a rank holds")
    bench.results.row(
        "tp.memory_per_rank[4]", held[4] / held[1], note="of the tiny shape, its norms included"
    )


def _host(bench: Bench, folder: Path, quick: bool) -> None:
    """Processor seconds of the engine's thread in a decode step, over those with one rank, in alternating
    rounds: it plans, sends plans to all ranks and reads their results. Collectives are in the ranks.

    A thread that has slept for 14 ms, as long as the collectives of two processes take, needs three times as
    long for the same calls: its caches are cold. One rank's thread rests for the same time before each step.
    """
    rounds, steps = (2, 10) if quick else (7, 100)
    taken: dict[str, list[float]] = {}
    ratios: dict[int, list[float]] = {2: [], 4: []}
    with ExitStack() as stack:
        engines = {ranks: stack.enter_context(engine_of(folder, ranks)) for ranks in (1, *ratios)}
        for number in range(rounds + 1):
            one, length = _step_seconds(engines[1], bench, steps, number)
            found = {"1": one}
            for ranks in ratios:
                found[str(ranks)], own = _step_seconds(engines[ranks], bench, steps, number)
                rest = max(own - length, 0.0)
                rested, _ = _step_seconds(engines[1], bench, steps, number, rest)
                found[f"1, rested as {ranks}"] = rested
                if number:  # the first round warms up
                    ratios[ranks].append(found[str(ranks)] / rested)
            for name, seconds in found.items() if number else ():
                taken.setdefault(name, []).append(seconds)
    for name, all_of in taken.items():
        spread = 1e6 * min(all_of), 1e6 * max(all_of)
        bench.results.figure(f"tp.host.step[{name}]", 1e6 * median(all_of), "us a step", spread)
    for ranks, each in ratios.items():
        note = (
            "processor time of the engine's thread in a decode step, over that of one rank in its own "
            "process, whose thread rests as long between two steps"
        )
        bench.results.row(f"tp.host[{ranks}]", median(each), (min(each), max(each)), note, _SPREAD)


def _step_seconds(
    engine: Engine, bench: Bench, steps: int, seed: int, rest: float = 0.0
) -> tuple[float, float]:
    """Processor seconds of this thread in a step, while some answers decode, and the seconds that a step
    takes. The thread sleeps for `rest` seconds before each."""
    sampling = SamplingParams(max_tokens=steps + 2 * _SETTLED, ignore_eos=True)
    for prompt in fixed_prompts(_ANSWERS, _PROMPT, bench.shape.vocabulary, seed):
        engine.generate(prompt, None, sampling)
    for _ in range(_SETTLED):
        engine.step()
    gc.collect()
    own = whole = 0.0
    for _ in range(steps):
        time.sleep(rest)
        began, began_at = time.thread_time(), time.perf_counter()
        engine.step()
        own += time.thread_time() - began
        whole += time.perf_counter() - began_at
    engine.run()
    return own / steps, whole / steps


def _plans(bench: Bench, quick: bool) -> None:
    """Candidates between real processes, of each case: the chosen plan beside the dearest and beside all
    weights whole, and the order of prices beside that of measured seconds. The least of the cases counts."""
    sizes, results = _QUICK if quick else _FULL, bench.results
    link = measured_link(RANKS)
    results.figure("plan.link.latency", 1e6 * link.latency, "us")
    results.figure("plan.link.rate", link.rate / 1e9, "GB/s")
    orders, least = [], dict[str, tuple[float, ...]]()
    for case in cases_of(sizes):
        found = measure_candidates(case, link, sizes)
        orders.append(spearman([one.price for one in found], seconds_of(found)))
        others = {
            "plan.vs_worst": max(found, key=lambda one: one.price),
            "plan.vs_replicate_all": next(one for one in found if replicates_all(one.plan)),
        }
        for key, rounds in ratios(found, others).items():
            if key not in least or median(rounds) < median(least[key]):
                least[key] = rounds
        results.figure(f"plan.{case.name}.spearman", orders[-1], "of prices and seconds")
        for number, (one, seconds) in enumerate(zip(found, seconds_of(found), strict=True)):
            spread = 1e3 * min(one.seconds), 1e3 * max(one.seconds)
            results.figure(f"plan.{case.name}.seconds[{number}]", 1e3 * seconds, "ms a step", spread)
            results.figure(f"plan.{case.name}.price[{number}]", 1e3 * one.price, "ms of collectives a pass")
    for key, rounds in least.items():
        note = f"seconds over the chosen plan's, {RANKS} processes; the least of three cases"
        results.row(key, median(rounds), (min(rounds), max(rounds)), note, _SPREAD)
    note = "of the order of prices and of measured seconds; the least of three cases"
    results.row("plan.spearman", min(orders), (min(orders), max(orders)), note, "least and greatest of cases")


def _pipeline(bench: Bench) -> None:
    """Training that two modelled stages keep beside answers, in the simulator's seconds."""
    found = measure_bubbles(fleet_of_stages(2))
    for name, value in (("beside", found.beside), ("alone", found.alone)):
        bench.results.figure(f"pipeline.{name}", value, "tokens trained a modelled second")
    bench.results.figure("pipeline.within", found.within, "share of answers within their bounds")
    note = "13B on two stages of two A100, modelled: training beside answers over that without"
    bench.results.row("pipeline.bubble_filled", found.filled, note=note)


def _failover(bench: Bench, model: Path, folder: Path, quick: bool) -> None:
    """Each of two ranks of a server is killed, and stopped, amid streams and a job."""
    found = measure_failover(model, folder, bench.shape.vocabulary, how=tuple(HOW)[: 1 if quick else None])
    for one in found:
        name = f"failover.gap[{one.how}, rank {one.rank}]"
        bench.results.figure(name, one.longest_gap, "s, the longest gap of a stream")
    lost = sum(len(one.lost) for one in found)
    bench.results.row(
        "failover.lost", lost, note="tokens, steps and streams that were lost, doubled or unlike"
    )
    gaps = [one.longest_gap for one in found]
    bench.results.row("failover.gap", max(gaps), (min(gaps), max(gaps)), "s, the longest of all", _SPREAD)
