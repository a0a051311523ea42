"""Kills parts of a server in the middle of streams and jobs, and compares with what happens in peace.

In the deterministic mode the same streams and jobs must bring the same tokens and the same weights, however
often the processes behind them die.
"""

import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from coserve.workload.requests import fixed_prompts
from coserve_benchmarks.client import Clients
from coserve_benchmarks.ledger import Ledger, Scribe
from coserve_benchmarks.served import Served, Victim
from coserve_benchmarks.streams import Ask

_NAP = 0.02  # seconds
_SEEDS = (1, 2)  # of the two jobs


@dataclass(frozen=True, slots=True)
class Work:
    """What is under way when something is killed: streams, and two jobs on the same data.

    `batch` examples make an optimizer step. `temperature` is that of every other stream; the others are
    greedy. `vocabulary` is that of the prompts.
    """

    streams: int
    prompt: int
    answer: int
    vocabulary: int
    data: bytes
    batch: int
    temperature: float = 0.8

    @property
    def asks(self) -> list[Ask]:
        prompts = fixed_prompts(self.streams, self.prompt, self.vocabulary)
        return [
            Ask(prompt, self.answer, temperature=self.temperature * (n % 2), seed=n, tells_tokens=True)
            for n, prompt in enumerate(prompts)
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one kill did. Times are seconds.

    `live` streams had not ended at the kill, and `training` jobs neither. `continued` of the live streams
    went on over the connection they had, `same` of all brought the tokens of an uninterrupted run, by
    position. `lost` are acknowledged things that were not there afterwards, or not the same; `wrong` what
    differs in the jobs: steps, losses, weights.
    """

    victim: Victim
    live: int
    training: int
    continued: int
    same: int
    streams: int
    longest_gap: float
    ready_after: float
    acknowledged: int
    lost: tuple[str, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """A job at its end."""

    losses: list[tuple[int, float]]
    weights: str  # SHA-256


@dataclass(frozen=True, slots=True)
class _Struck:
    """The moment of a kill, and how long until the server was ready again."""

    at: float
    ready_after: float
    training: int


class Kills:
    """The same work over and over on one server in the deterministic mode, which `peace` must see first.

    `tokens`, by stream and position, and `trained` are those of the uninterrupted run, and so is the
    `longest_calm_gap` between two tokens, in seconds.
    """

    def __init__(self, served: Served, work: Work) -> None:
        self.longest_calm_gap = 0.0
        self.served, self._work = served, work
        self.tokens: list[list[int]] = []
        self.trained: list[Trained] = []
        self._ledgers: list[Ledger] = []

    def close(self) -> None:
        for ledger in self._ledgers:
            ledger.close()

    def peace(self) -> None:
        """An uninterrupted run."""
        ledger, jobs = self.begin()
        with Clients(self.served.url, self.served.name, self._work.asks) as clients:
            heard = clients.result()
        self.tokens = [one.tokens for one in heard]
        assert all(len(tokens) == self._work.answer for tokens in self.tokens)
        self.longest_calm_gap = max(one.longest_gap for one in heard)
        self.trained = self.end(ledger, jobs)

    def strike(self, victim: Victim, draw: random.Random) -> Outcome:
        """Kills once, at a random instant of the streams, and waits until everything has ended."""
        work = self._work
        pieces = draw.randint(2 * work.streams, int(0.7 * work.streams * work.answer))
        ledger, jobs = self.begin()
        with Clients(self.served.url, self.served.name, work.asks, pieces) as clients:
            struck = self._strike(victim, clients, ledger, jobs, draw.uniform(0.0, 0.02))
            lost = ledger.missing()
            heard = clients.result()
        trained = self.end(ledger, jobs)
        lost += ledger.missing()
        live = [one for one in heard if one.is_live(struck.at)]
        pairs = zip(heard, self.tokens, strict=True)
        return Outcome(
            victim=victim,
            live=len(live),
            training=struck.training,
            continued=sum(one.attempts == 1 for one in live),
            same=sum(one.agrees and one.tokens == tokens for one, tokens in pairs),
            streams=len(heard),
            longest_gap=max(one.longest_gap for one in heard),
            ready_after=struck.ready_after,
            acknowledged=len(ledger),
            lost=tuple(lost),
            wrong=tuple(_differences(jobs, trained, self.trained)),
        )

    def lost_in_all(self) -> list[str]:
        """What any run was told of and is not there now."""
        return [one for ledger in self._ledgers for one in ledger.missing()]

    def begin(self) -> tuple[Ledger, list[str]]:
        """Two jobs, both training."""
        ledger = Ledger(self.served.url, self.served.name)
        self._ledgers.append(ledger)
        data = ledger.upload(self._work.data)
        epochs = {"n_epochs": 1, "batch_size": self._work.batch}
        jobs = [ledger.start_job(data, seed=seed, hyperparameters=epochs) for seed in _SEEDS]
        while not all(ledger.losses(job) for job in jobs):
            time.sleep(_NAP)
        return ledger, jobs

    def _strike(
        self, victim: Victim, clients: Clients, ledger: Ledger, jobs: Sequence[str], pause: float
    ) -> _Struck:
        with Scribe(ledger):
            clients.wait_reached()
            time.sleep(pause)
            before = self.served.running
            at = self.served.kill(victim)
        training = sum(not ledger.has_seen("end", job) for job in jobs)
        if victim is Victim.EVERYTHING:
            self.served.start()
        gone = {Victim.ENGINE: {before.engine}, Victim.API: {before.api}, Victim.EVERYTHING: set[int]()}
        self.served.wait_ready(without=gone[victim])
        return _Struck(at, time.monotonic() - at, training)

    def end(self, ledger: Ledger, jobs: Sequence[str]) -> list[Trained]:
        """Waits for the jobs' ends."""
        found = []
        for id in jobs:
            job = ledger.wait_job(id)
            weights = ledger.weights(job["fine_tuned_model"])
            found.append(Trained(ledger.losses(id), hashlib.sha256(weights).hexdigest()))
        ledger.look()
        return found


def _differences(jobs: Sequence[str], found: Sequence[Trained], expected: Sequence[Trained]) -> list[str]:
    """What is not as in peace, in words."""
    wrong = []
    for id, now, then in zip(jobs, found, expected, strict=True):
        if [step for step, _ in now.losses] != [step for step, _ in then.losses]:
            wrong.append(f"{id}: the steps are {[step for step, _ in now.losses]}")
        elif now.losses != then.losses:
            first = next(a for a, b in zip(now.losses, then.losses, strict=True) if a != b)
            wrong.append(f"{id}: the losses differ from step {first[0]} on")
        if now.weights != then.weights:
            wrong.append(f"{id}: the weights at the end differ")
    return wrong
