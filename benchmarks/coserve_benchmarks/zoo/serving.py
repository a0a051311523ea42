"""Twelve applications under one load: in one engine, in one engine by turns, and each with an engine of its
own, of which as many are in memory as the first takes (BlockLLM, 7.2)."""

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Final

from coserve.config import EngineConfig
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.memory.ledger import Account
from coserve.workload.requests import greedy
from coserve.zoo.export import exported
from coserve.zoo.store import Zoo
from coserve.zoo.views import Served
from coserve_benchmarks.results import Results
from coserve_benchmarks.timing import ratio_of
from coserve_benchmarks.zoo.provision import (
    ANSWER,
    PROMPT,
    Asked,
    InTurns,
    Outcome,
    Swapped,
    Together,
    make_load,
    replay,
)

CONFIG: Final = EngineConfig(calibrate=False, cache_tokens=16384, prefix_sharing=False)
# With 64 answers at once, the default, a full machine answers 3,760 tokens/s shared and 5,490 by turns; with
# 192 it is 6,050 and 5,660.
_RUNNING: Final = replace(CONFIG, max_running=256, cache_tokens=32768)
_BURST: Final = 192  # requests at once, to find how many a second can be answered
_SECONDS: Final = 12.0  # in which requests arrive, each round
_ROUNDS: Final = 3


class RunningEngine:
    """Requests under way in an engine of `model`, with `adapters` by application."""

    def __init__(self, model: Path, adapters: Mapping[str, Path]) -> None:
        gc.collect()  # of an engine that this one takes the place of
        self._engine = Engine(str(model), _RUNNING)
        self._adapters = adapters
        for name, folder in adapters.items():
            self._engine.adapters.load(name, folder)
        self._answers: list[tuple[Asked, Completion]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        accounts = self._engine.memory.ledger.accounts()
        return accounts[Account.BASE] + accounts[Account.ADAPTERS]

    @property
    def base_nbytes(self) -> int:
        """Bytes of the foundation's weights: of one whole model."""
        return self._engine.base.nbytes

    def __len__(self) -> int:
        return len(self._answers)

    def submit(self, asked: Asked) -> None:
        adapter = asked.application if asked.application in self._adapters else None
        answer = self._engine.generate(asked.prompt, adapter, greedy(asked.answer), text=False)
        self._answers.append((asked, answer))

    def step(self) -> list[Asked]:
        self._engine.step()
        done = [asked for asked, answer in self._answers if answer.finish_reason is not None]
        self._answers = [pair for pair in self._answers if pair[1].finish_reason is None]
        return done


def measure_serving(
    results: Results, zoo: Zoo, served: Served, names: Sequence[str], quick: bool, own: str = "serving"
) -> None:
    """Rates and latencies of all three on the same arrivals, which come as fast as the first can answer
    them; `own` begins the names of all figures."""
    adapters = {name: served.adapters[name] for name in names}
    with ExitStack() as stack:
        models: dict[str, tuple[Path, Path | None]] = {}
        for name in names:
            whole = zoo.application(name).parent if zoo.application(name).is_adapter else name
            folder = stack.enter_context(exported(zoo, whole))
            models[name] = folder, None if whole == name else served.adapters[name]
        shared, by_turns = (RunningEngine(served.model, adapters) for _ in range(2))
        together, turns = Together(dict.fromkeys(names, shared)), InTurns(dict.fromkeys(names, by_turns))
        most = max(1, shared.nbytes // shared.base_nbytes)

        def load_model(name: str) -> RunningEngine:
            model, adapter = models[name]
            return RunningEngine(model, {} if adapter is None else {name: adapter})

        swapped = Swapped(load_model, most)
        vocabulary = zoo.application(served.name).vocabulary
        burst = [
            replace(asked, at=0.0)
            for asked in make_load(names, _BURST / 8 if quick else _BURST, 1.0, vocabulary, 0)
        ]
        for provision in (swapped, turns, together):
            replay(provision, burst)  # what the first steps of each shape take longer is not counted
        capacity = replay(together, burst).rate / ANSWER
        seconds, rounds = (2.0, 1) if quick else (_SECONDS, _ROUNDS)
        found: dict[str, list[Outcome]] = {"together": [], "turns": [], "swapped": []}
        for turn in range(rounds):
            load = make_load(names, capacity, seconds, vocabulary, turn + 1)
            for name, provision in (("together", together), ("turns", turns), ("swapped", swapped)):
                found[name].append(replay(provision, load))
    for name, outcomes in found.items():
        results.figure(f"{own}.{name}", median(one.rate for one in outcomes), "tokens/s")
        results.figure(f"{own}.{name}.p95", median(one.p95 for one in outcomes), "seconds")
    for key, peer, of in (
        ("throughput", "swapped", attrgetter("rate")),
        ("p95", "swapped", attrgetter("p95")),
        ("vs_parameter_sharing", "turns", attrgetter("rate")),
    ):
        ratio = ratio_of([of(a) / of(b) for a, b in zip(found["together"], found[peer], strict=True)])
        results.ratio(f"{own}.{key}", ratio)
    results.note(
        own,
        f"{len(names)} applications, {capacity:.1f} requests a second for {seconds:g} s, prompts of "
        f"{PROMPT[0]} to {PROMPT[1]} tokens, answers of {ANSWER}; {most} whole models are in memory "
        f"where each has an engine, {swapped.loads} loads in all rounds; by turns: a batch of one "
        f"application until its end; each engine answers up to {_RUNNING.max_running} requests at once",
    )
