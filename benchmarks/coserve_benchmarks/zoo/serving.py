"""Twelve applications under one load: in one engine, in one engine by turns, and each with an engine of its
own, of which as many are in memory as the first takes (BlockLLM, 7.2)."""

import gc
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Final, Protocol

from coserve.config import EngineConfig
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.memory.ledger import Account
from coserve.simulate.intervals import percentile
from coserve.workload.arrivals import poisson_times
from coserve.workload.requests import greedy
from coserve.zoo.export import exported
from coserve.zoo.store import Zoo
from coserve.zoo.views import Served
from coserve_benchmarks.results import Results
from coserve_benchmarks.timing import ratio_of

CONFIG: Final = EngineConfig(calibrate=False, cache_tokens=16384, prefix_sharing=False)
_PROMPT: Final = (16, 96)  # tokens of a prompt, from and to
_ANSWER: Final = 32  # tokens
_NAP: Final = 0.001  # seconds
_BURST: Final = 192  # requests at once, to find how many a second can be answered
_SECONDS: Final = 12.0  # in which requests arrive, each round
_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for an application at a time, in seconds from the start."""

    at: float
    application: str
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens of answers a second, from the first arrival to the last answer, and the 95th percentile of
    seconds from arrival to answer."""

    rate: float
    p95: float


class Provision(Protocol):
    """Serves requests as they come."""

    def submit(self, asked: Asked) -> None:
        """Takes a request."""
        ...

    def step(self) -> list[Asked]:
        """Runs one step; the requests whose answers are complete."""
        ...

    @property
    def has_work(self) -> bool: ...


class _Running:
    """Requests under way in one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._answers: list[tuple[Asked, Completion]] = []

    def __len__(self) -> int:
        return len(self._answers)

    def submit(self, asked: Asked, adapter: str | None) -> None:
        answer = self.engine.generate(asked.prompt, adapter, greedy(_ANSWER), text=False)
        self._answers.append((asked, answer))

    def step(self) -> list[Asked]:
        self.engine.step()
        done = [asked for asked, answer in self._answers if answer.finish_reason is not None]
        self._answers = [pair for pair in self._answers if pair[1].finish_reason is None]
        return done


class Together:
    """All applications in one engine and in the same steps."""

    def __init__(self, model: Path, adapters: Mapping[str, Path]) -> None:
        self._running = _Running(Engine(str(model), CONFIG))
        for name, folder in adapters.items():
            self._running.engine.load_adapter(name, folder)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        accounts = self._running.engine.memory.ledger.accounts()
        return accounts[Account.BASE] + accounts[Account.ADAPTERS]

    @property
    def base_nbytes(self) -> int:
        """Bytes of the foundation's weights: of one whole model."""
        return self._running.engine.base.nbytes

    def submit(self, asked: Asked) -> None:
        self._running.submit(asked, asked.application)

    def step(self) -> list[Asked]:
        return self._running.step()

    @property
    def has_work(self) -> bool:
        return bool(self._running)


class InTurns(Together):
    """One copy of shared weights, and a batch of one application at a time: the one whose request has waited
    longest is next, with all of its requests that are there."""

    def __init__(self, model: Path, adapters: Mapping[str, Path]) -> None:
        super().__init__(model, adapters)
        self._waiting: deque[Asked] = deque()

    def submit(self, asked: Asked) -> None:
        self._waiting.append(asked)

    def step(self) -> list[Asked]:
        if not self._running:
            chosen = self._waiting[0].application
            for asked in [one for one in self._waiting if one.application == chosen]:
                super().submit(asked)
            self._waiting = deque(one for one in self._waiting if one.application != chosen)
        return super().step()

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)


class Swapped:
    """An engine for each application, `most` of them in memory. A model that is asked for and not there takes
    the place of the one that was used least recently, once the requests under way in that are answered."""

    def __init__(self, models: Mapping[str, tuple[Path, Path | None]], most: int) -> None:
        """`models` are folders of whole models by application, with those of their adapters."""
        self._models, self._most = models, most
        self._loaded: dict[str, _Running] = {}  # least recently used first
        self._waiting: deque[Asked] = deque()
        self.loads = 0

    def submit(self, asked: Asked) -> None:
        self._waiting.append(asked)

    def step(self) -> list[Asked]:
        absent = next((one.application for one in self._waiting if one.application not in self._loaded), None)
        leaving = self._make_room() if absent is not None else None
        if absent is not None and len(self._loaded) < self._most:
            self._load(absent)
        done = list[Asked]()
        kept = deque[Asked]()
        for asked in self._waiting:
            running = self._loaded.get(asked.application)
            if running is None or asked.application == leaving:
                kept.append(asked)
            else:
                running.submit(asked, None if self._models[asked.application][1] is None else "own")
        self._waiting = kept
        for name, running in list(self._loaded.items()):
            if running:
                self._loaded[name] = self._loaded.pop(name)
                done += running.step()
        return done

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or any(map(len, self._loaded.values())))

    def _make_room(self) -> str | None:
        """Drops the model that was used least recently, if it is idle; else its name."""
        if len(self._loaded) < self._most:
            return None
        idle = next((name for name, running in self._loaded.items() if not running), None)
        if idle is None:
            return next(iter(self._loaded))
        del self._loaded[idle]
        gc.collect()
        return None

    def _load(self, name: str) -> None:
        model, adapter = self._models[name]
        engine = Engine(str(model), CONFIG)
        if adapter is not None:
            engine.load_adapter("own", adapter)
        self._loaded[name] = _Running(engine)
        self.loads += 1


def make_load(
    applications: Sequence[str], rate: float, seconds: float, vocabulary: int, seed: int
) -> list[Asked]:
    """Poisson arrivals for applications of uneven popularity: each one's mean rate is drawn uniformly, and
    all of them together are `rate` a second."""
    draws = random.Random(seed)
    weights = [draws.uniform(0.1, 1.0) for _ in applications]
    load = []
    for number, (name, weight) in enumerate(zip(applications, weights, strict=True)):
        own = rate * weight / sum(weights)
        for at in poisson_times(own, seconds, seed * len(applications) + number):
            prompt = tuple(draws.randrange(3, vocabulary) for _ in range(draws.randint(*_PROMPT)))
            load.append(Asked(at, name, prompt))
    return sorted(load, key=lambda asked: asked.at)


def replay(provision: Provision, load: Sequence[Asked]) -> Outcome:
    """Hands requests over when they are due, until all are answered."""
    coming, latencies = deque(load), list[float]()
    started = time.perf_counter()
    while coming or provision.has_work:
        now = time.perf_counter() - started
        while coming and coming[0].at <= now:
            provision.submit(coming.popleft())
        if not provision.has_work:
            time.sleep(min(_NAP, max(0.0, coming[0].at - now)))
            continue
        done = provision.step()
        now = time.perf_counter() - started
        latencies += [now - asked.at for asked in done]
    assert len(latencies) == len(load), "every request is answered"
    taken = time.perf_counter() - started - load[0].at
    return Outcome(len(load) * _ANSWER / taken, percentile(latencies, 0.95))


def measure_serving(results: Results, zoo: Zoo, served: Served, names: Sequence[str], quick: bool) -> None:
    """Rates and latencies of all three on the same arrivals, which come as fast as the first can answer
    them."""
    adapters = {name: served.adapters[name] for name in names}
    with ExitStack() as stack:
        models: dict[str, tuple[Path, Path | None]] = {}
        for name in names:
            whole = zoo.application(name).parent if zoo.application(name).is_adapter else name
            folder = stack.enter_context(exported(zoo, whole))
            models[name] = folder, None if whole == name else served.adapters[name]
        together, turns = Together(served.model, adapters), InTurns(served.model, adapters)
        most = max(1, together.nbytes // together.base_nbytes)
        swapped = Swapped(models, most)
        vocabulary = zoo.application(served.name).vocabulary
        burst = [
            Asked(0.0, asked.application, asked.prompt)
            for asked in make_load(names, _BURST / 8 if quick else _BURST, 1.0, vocabulary, 0)
        ]
        for provision in (swapped, turns, together):
            replay(provision, burst)  # what the first steps of each shape take longer is not counted
        capacity = replay(together, burst).rate / _ANSWER
        seconds, rounds = (2.0, 1) if quick else (_SECONDS, _ROUNDS)
        found: dict[str, list[Outcome]] = {"together": [], "turns": [], "swapped": []}
        for turn in range(rounds):
            load = make_load(names, capacity, seconds, vocabulary, turn + 1)
            for name, provision in (("together", together), ("turns", turns), ("swapped", swapped)):
                found[name].append(replay(provision, load))
    for name, outcomes in found.items():
        results.figure(f"serving.{name}", median(one.rate for one in outcomes), "tokens/s")
        results.figure(f"serving.{name}.p95", median(one.p95 for one in outcomes), "seconds")
    for key, peer, of in (
        ("serving.throughput", "swapped", attrgetter("rate")),
        ("serving.p95", "swapped", attrgetter("p95")),
        ("serving.vs_parameter_sharing", "turns", attrgetter("rate")),
    ):
        ratio = ratio_of([of(a) / of(b) for a, b in zip(found["together"], found[peer], strict=True)])
        results.row(key, ratio.value, (ratio.low, ratio.high))
    results.note(
        "serving",
        f"{len(names)} applications, {capacity:.1f} requests a second for {seconds:g} s, prompts of "
        f"{_PROMPT[0]} to {_PROMPT[1]} tokens, answers of {_ANSWER}; {most} whole models are in memory "
        f"where each has an engine, {swapped.loads} loads in all rounds; by turns: a batch of one "
        "application until its end",
    )
