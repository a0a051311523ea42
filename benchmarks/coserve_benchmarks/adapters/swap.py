"""Row `swap.others_p99_ratio`: the effect of loading cold adapters on requests for resident ones.

Thousands of adapters lie on disk, and there is memory for some. Requests come at random times, and the
popularity of their adapters falls as a power of their rank. *Others* are requests for the most popular ones
that find theirs in memory. They are timed three times, with the same arrivals and prompts: as it comes
(*cold*); with all the rest asking for adapters that are in memory, too (*warm*: the same work without
loading); and without the rest (*alone*).
"""

import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from coserve.adapters.files import CONFIG, WEIGHTS, write_adapter
from coserve.adapters.methods.lora import LoRAConfig
from coserve.engine.engine import Engine
from coserve.engine.process import SWITCH
from coserve.simulate.intervals import percentile
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve.train.fresh import fresh_adapter
from coserve.wire.messages import Paging
from coserve.workload.requests import TimedRequest, Workload, fixed_prompts, greedy
from coserve_benchmarks.drive import serve
from coserve_benchmarks.intervals import interval
from coserve_benchmarks.ours import Bench, make_engine
from coserve_benchmarks.timing import OF_REQUESTS

_RANK: Final = 8
_EXPONENT: Final = 1.0  # of the power law, Zipf's
TIMED: Final = ("cold", "warm")  # in every round
ARMS: Final = (*TIMED, "alone")


@dataclass(frozen=True, slots=True)
class SwapSizes:
    """Sizes of one run: `adapters` on disk, of which `files` have weights of their own; memory for
    `resident`; the first `popular` are the others'. `rate` is requests a second."""

    adapters: int = 2000
    files: int = 16
    resident: int = 64
    popular: int = 32
    rate: float = 5.0
    seconds: float = 12.0
    prompt: int = 32
    answer: int = 32
    running: int = 32
    rounds: int = 5

    @staticmethod
    def of(bench: Bench, quick: bool) -> "SwapSizes":
        if bench.shape.name == "tiny":
            return SwapSizes(40, 2, 6, 3, 30.0, 1.5, 4, 6, 8, 1)
        return SwapSizes(rounds=1) if quick else SwapSizes()


def run(bench: Bench, quick: bool) -> None:
    """Measures the row and its figures."""
    sizes = SwapSizes.of(bench, quick)
    with tempfile.TemporaryDirectory() as scratch, _switching():
        engine = _engine(bench, sizes, Path(scratch))
        rounds: list[dict[str, LoadResult]] = []
        moved = []
        serve(engine, _workload(bench, sizes, -1, "cold"))  # what every step makes the first time
        for number in range(sizes.rounds):
            rounds.append({})
            for arm in ARMS if number == 0 else TIMED[:: -1 if number % 2 else 1]:
                _warm(engine, bench, sizes)
                before = engine.stats().paging
                rounds[-1][arm] = serve(engine, _workload(bench, sizes, number, arm))
                if arm == "cold":
                    moved.append((before, engine.stats().paging))
        _tell(bench, sizes, rounds)
        _tell_paging(bench, moved)


@contextmanager
def _switching() -> Iterator[None]:
    """Sets the interpreter's switch interval to that of an engine's process."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _engine(bench: Bench, sizes: SwapSizes, scratch: Path) -> Engine:
    """An engine with all adapters registered, and memory for `sizes.resident` of them."""
    sample = make_engine(bench, max_running=sizes.running, calibrate=False)
    folders = _folders(sample, sizes, scratch)
    cost = sample.adapters.register("sample", folders[0]).cost
    del sample
    engine = make_engine(bench, max_running=sizes.running, adapter_memory=cost * sizes.resident)
    for number, folder in enumerate(folders):
        engine.adapters.register(_name(number), folder)
    return engine


def _folders(engine: Engine, sizes: SwapSizes, scratch: Path) -> list[Path]:
    """PEFT's two files of each adapter, with matrices that are all random. Most are links to the files of a
    few: two thousand would take 19 GB."""
    for number in range(sizes.files):
        drawn = fresh_adapter(engine.base, "drawn", LoRAConfig(rank=_RANK), number)
        generator = torch.Generator().manual_seed(number)
        filled = {
            key: torch.empty_like(tensor).normal_(0, 0.02, generator=generator)
            for key, tensor in drawn.parameters().items()
        }
        write_adapter(drawn.with_parameters(filled), scratch / f"{number}")
    for number in range(sizes.files, sizes.adapters):
        (scratch / f"{number}").mkdir()
        for file in (CONFIG, WEIGHTS):
            os.link(scratch / f"{number % sizes.files}" / file, scratch / f"{number}" / file)
    return [scratch / f"{number}" for number in range(sizes.adapters)]


def _name(number: int) -> str:
    return f"adapter-{number}"


def _warm(engine: Engine, bench: Bench, sizes: SwapSizes) -> None:
    """Brings the popular adapters into memory and into their slots."""
    prompts = fixed_prompts(sizes.popular, sizes.prompt, bench.shape.vocabulary, bench.settings.seed)
    for number, prompt in enumerate(prompts):
        engine.generate(prompt, _name(number), greedy(4))
    engine.run()


def _workload(bench: Bench, sizes: SwapSizes, number: int, arm: str) -> Workload:
    """The requests of a round; those of another arm differ only in what the rest ask for, or in that it stays
    away. Arrivals are a Poisson process: regular ones would only meet where loading delays some."""
    draws = random.Random(f"{bench.settings.seed} {number}")
    weights = [(rank + 1) ** -_EXPONENT for rank in range(sizes.adapters)]
    requests = []
    at = draws.expovariate(sizes.rate)
    while at < sizes.seconds:
        (rank,) = draws.choices(range(sizes.adapters), weights)
        prompt = tuple(draws.randrange(bench.shape.vocabulary) for _ in range(sizes.prompt))
        stand_in = draws.randrange(sizes.popular)
        if arm != "alone" or rank < sizes.popular:
            chosen = stand_in if arm == "warm" and rank >= sizes.popular else rank
            requests.append(TimedRequest(at, prompt, sizes.answer, _name(chosen)))
        at += draws.expovariate(sizes.rate)
    return Workload(
        "swap", "requests for adapters of power-law popularity", sizes.seconds, tuple(requests), ()
    )


def _others(
    sizes: SwapSizes, workload: Workload, loads: dict[str, LoadResult]
) -> dict[str, list[AnswerTimes]]:
    """By arm, the answers to requests for a popular adapter that was in memory."""
    popular = {_name(number) for number in range(sizes.popular)}
    ours = [request.adapter in popular for request in workload.requests]
    found = [not answered.kept for answered in loads["cold"].answers]
    chosen = [mine and there for mine, there in zip(ours, found, strict=True)]
    of_ours = [there for mine, there in zip(ours, found, strict=True) if mine]
    among = {"cold": chosen, "warm": chosen, "alone": of_ours}
    return {arm: list(compress(load.answers, among[arm])) for arm, load in loads.items()}


def _tell(bench: Bench, sizes: SwapSizes, rounds: Sequence[dict[str, LoadResult]]) -> None:
    """Reports the row, of all rounds together."""
    others = [
        _others(sizes, _workload(bench, sizes, number, "cold"), loads) for number, loads in enumerate(rounds)
    ]
    p99 = {arm: [_gap(found[arm]) for found in others if arm in found] for arm in ARMS}
    together = {arm: [a for found in others for a in found.get(arm, ())] for arm in ARMS}
    for arm in ARMS:
        low, high = interval(_GapsOf(together[arm]), range(len(together[arm])))
        spread = (1e3 * low, 1e3 * high)
        bench.results.figure(f"swap.others_gap_p99[{arm}]", 1e3 * _gap(together[arm]), "ms", spread)
        bench.results.figure(f"swap.others_gap_p50[{arm}]", 1e3 * _gap(together[arm], 0.5), "ms")
        _first_tokens(bench, f"others_first_token[{arm}]", together[arm])
    asked = [answered for loads in rounds for answered in loads["cold"].answers]
    _first_tokens(bench, "cold_first_token", [answered for answered in asked if answered.kept])
    note = (
        f"{sizes.adapters} adapters on disk (links to {sizes.files} files, which the system's cache holds), "
        f"memory for {sizes.resident}, {sizes.rate:g} requests a second; in the first round, over the others "
        f"alone, without the work of the rest: {p99['cold'][0] / p99['alone'][0]:.2f}"
    )
    value = _gap(together["cold"]) / _gap(together["warm"])
    arms = [_GapsOf(together[arm]) for arm in TIMED]

    def ratio(*requests: Any, axis: int) -> Any:
        cold, warm = (arm(those, axis=axis) for arm, those in zip(arms, requests, strict=True))
        return cold / warm

    spread = interval(ratio, *(range(len(together[arm])) for arm in TIMED))
    bench.results.row("swap.others_p99_ratio", value, spread, note, OF_REQUESTS)


class _GapsOf:
    """The 99th percentile of the gaps of answers, which are given by their places."""

    def __init__(self, answers: Sequence[AnswerTimes]) -> None:
        self._gaps = [answered.gaps for answered in answers]

    def __call__(self, places: Any, axis: int) -> Any:
        return np.apply_along_axis(self._of, axis, places)

    def _of(self, places: Any) -> float:
        return float(np.quantile(np.concatenate([self._gaps[int(place)] for place in places]), 0.99))


def _gap(answers: Sequence[AnswerTimes], share: float = 0.99) -> float:
    """Seconds between two tokens: the quantile `share`."""
    return percentile([gap for answered in answers for gap in answered.gaps], share)


def _first_tokens(bench: Bench, name: str, answers: Sequence[AnswerTimes]) -> None:
    times = [answered.first_token for answered in answers]
    for share in (50, 99):
        bench.results.figure(f"swap.{name}_p{share}", 1e3 * percentile(times, share / 100), "ms")


def _tell_paging(bench: Bench, moved: Sequence[tuple[Paging, Paging]]) -> None:
    """Reports hits, misses and loads of the cold rounds."""
    results = bench.results
    hits = sum(after.hits - before.hits for before, after in moved)
    misses = sum(after.misses - before.misses for before, after in moved)
    results.figure("swap.hit_rate", hits / (hits + misses), "of the requests")
    results.figure("swap.loaded", sum(after.loaded - before.loaded for before, after in moved), "adapters")
    nbytes = sum(after.loaded_bytes - before.loaded_bytes for before, after in moved)
    results.figure("swap.loaded_bytes", nbytes / 1e6, "MB")
    results.figure("swap.used_bytes", moved[-1][1].used_bytes / 1e6, "MB, slots included")
    results.figure("swap.known", moved[-1][1].known, "adapters on disk")
