"""Provisions of one device with applications that share a foundation, and loads for them (BlockLLM, 7.1).

What an engine is and what time is are parameters: `serving` has engines in real time, the simulator's papers
have modelled ones on a virtual clock.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from coserve.simulate.intervals import percentile
from coserve.workload.arrivals import poisson_times

ANSWER: Final = 32  # tokens
PROMPT: Final = (16, 96)  # tokens of a prompt, from and to
_NAP: Final = 0.001  # seconds


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for an application at a time, in seconds from the start."""

    at: float
    application: str
    prompt: tuple[int, ...]
    answer: int = ANSWER


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens of answers a second, from the first arrival to the last answer; the median and the 95th
    percentile of seconds from arrival to answer."""

    rate: float
    p50: float
    p95: float


class Clock(Protocol):
    """Seconds from the start of a load."""

    def now(self) -> float: ...

    def wait(self, seconds: float) -> None: ...


class WallClock:
    """Real time, from when it was made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._started

    def wait(self, seconds: float) -> None:
        time.sleep(min(_NAP, seconds))


class Running(Protocol):
    """Requests under way in one engine."""

    def __len__(self) -> int: ...

    def submit(self, asked: Asked) -> None: ...

    def step(self) -> list[Asked]:
        """Runs one step; the requests whose answers are complete."""
        ...


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


class Together:
    """All applications at once, in the same steps where they have the same engine; engines take turns, a step
    each."""

    def __init__(self, engines: Mapping[str, Running]) -> None:
        """`engines` are those of each application."""
        self._of = engines
        self._engines = [*{id(engine): engine for engine in engines.values()}.values()]

    def submit(self, asked: Asked) -> None:
        self._of[asked.application].submit(asked)

    def step(self) -> list[Asked]:
        return [asked for engine in self._engines if len(engine) for asked in engine.step()]

    @property
    def has_work(self) -> bool:
        return any(map(len, self._engines))


class InTurns(Together):
    """One copy of shared weights, and a batch of one application at a time: the one whose request has waited
    longest is next, with all of its requests that are there."""

    def __init__(self, engines: Mapping[str, Running]) -> None:
        super().__init__(engines)
        self._waiting: deque[Asked] = deque()

    def submit(self, asked: Asked) -> None:
        self._waiting.append(asked)

    def step(self) -> list[Asked]:
        if not super().has_work:
            chosen = self._waiting[0].application
            for asked in [one for one in self._waiting if one.application == chosen]:
                super().submit(asked)
            self._waiting = deque(one for one in self._waiting if one.application != chosen)
        return super().step()

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._waiting)


class Swapped:
    """An engine for each application, `most` of them in memory. A model that is asked for and not there takes
    the place of the one that was used least recently, once the requests under way in that are answered."""

    def __init__(self, load: Callable[[str], Running], most: int) -> None:
        """`load` brings an application's model into memory."""
        self._load, self._most = load, most
        self._loaded: dict[str, Running] = {}  # least recently used first
        self._waiting: deque[Asked] = deque()
        self.loads = 0

    def submit(self, asked: Asked) -> None:
        self._waiting.append(asked)

    def step(self) -> list[Asked]:
        absent = next((one.application for one in self._waiting if one.application not in self._loaded), None)
        leaving = self._make_room() if absent is not None else None
        if absent is not None and len(self._loaded) < self._most:
            self._loaded[absent] = self._load(absent)
            self.loads += 1
        done = list[Asked]()
        kept = deque[Asked]()
        for asked in self._waiting:
            running = self._loaded.get(asked.application)
            if running is None or asked.application == leaving:
                kept.append(asked)
            else:
                running.submit(asked)
        self._waiting = kept
        for name, running in list(self._loaded.items()):
            if len(running):
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
        idle = next((name for name, running in self._loaded.items() if not len(running)), None)
        if idle is None:
            return next(iter(self._loaded))
        del self._loaded[idle]
        return None


def make_load(
    applications: Sequence[str],
    rate: float,
    seconds: float,
    vocabulary: int,
    seed: int,
    prompt: tuple[int, int] = PROMPT,
    answer: int = ANSWER,
) -> list[Asked]:
    """Poisson arrivals for applications of uneven popularity: each one's mean rate is drawn uniformly, and
    all of them together are `rate` a second."""
    draws = random.Random(seed)
    weights = [draws.uniform(0.1, 1.0) for _ in applications]
    load = []
    for number, (name, weight) in enumerate(zip(applications, weights, strict=True)):
        own = rate * weight / sum(weights)
        for at in poisson_times(own, seconds, seed * len(applications) + number):
            tokens = tuple(draws.randrange(3, vocabulary) for _ in range(draws.randint(*prompt)))
            load.append(Asked(at, name, tokens, answer))
    return sorted(load, key=lambda asked: asked.at)


def replay(provision: Provision, load: Sequence[Asked], clock: Clock | None = None) -> Outcome:
    """Hands requests over when they are due, until all are answered; in real time without a `clock`."""
    clock = WallClock() if clock is None else clock
    coming, latencies, started = deque(load), list[float](), clock.now()
    while coming or provision.has_work:
        now = clock.now() - started
        while coming and coming[0].at <= now:
            provision.submit(coming.popleft())
        if not provision.has_work:
            clock.wait(max(0.0, coming[0].at - now))
            continue
        done = provision.step()
        now = clock.now() - started
        latencies += [now - asked.at for asked in done]
    assert len(latencies) == len(load), "every request is answered"
    taken = clock.now() - started - load[0].at
    tokens = sum(asked.answer for asked in load)
    return Outcome(tokens / taken, percentile(latencies, 0.5), percentile(latencies, 0.95))
