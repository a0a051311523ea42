"""Replays a workload on a machine, on the machine's own clock and not by the scheduler's counters."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise
from operator import itemgetter
from typing import Final, Protocol

from coserve.core.events import Event, StepDone, TokenEvent, TrainingProgress
from coserve.core.request import SLO
from coserve.core.sequence import Direction, Sequence
from coserve.schedule.scheduler import Scheduler
from coserve.workload.requests import TimedJob, TimedRequest, Workload

_LOOKED_AT: Final = 64  # requests, for the next one that stops training


@dataclass(slots=True)
class AnswerTimes:
    """Times of a request: its arrival, and when the caller could see each token; engine's clock, seconds."""

    arrival: float
    tokens: list[float] = field(default_factory=list)
    slo: SLO = field(default_factory=SLO)  # its own bounds
    deferred: float = 0.0  # seconds that training held it up, where the engine says so
    deferred_first: float = 0.0  # of these, those before its first token
    kept: bool = False  # whether its adapter had to be brought into memory first

    @property
    def first_token(self) -> float:
        return self.tokens[0] - self.arrival

    @property
    def latency(self) -> float:
        return self.tokens[-1] - self.arrival

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.tokens)]

    def keeps(self, slo: SLO) -> bool:
        """Tells whether the first token, every gap between two tokens, the whole answer and the delay by
        training are within their bounds. A request without any token keeps none of them."""
        first, between, whole = slo.first_token, slo.between_tokens, slo.end_to_end
        if slo.deferral is not None and self.deferred > slo.deferral:
            return False
        if not self.tokens or (first is not None and self.first_token > first):
            return False
        if whole is not None and self.latency > whole:
            return False
        return between is None or all(gap <= between for gap in self.gaps)


@dataclass(slots=True)
class LoadResult:
    """Result of a load that ran from `started` for `seconds`, and until its last answer was complete."""

    started: float
    seconds: float
    answers: list[AnswerTimes] = field(default_factory=list)
    trained: list[tuple[float, float]] = field(default_factory=list)  # (when, tokens)
    losses: list[float] = field(default_factory=list)  # of optimizer steps, in order, over all jobs
    is_apart: bool = False  # whether training had processors of its own, and ended with the load's time
    processor: float = 0.0  # processor seconds used, by all processes that took part
    finished_at: float = 0.0  # when the last answer was complete, on the same clock

    @property
    def gaps(self) -> list[float]:
        return [gap for answer in self.answers for gap in answer.gaps]

    @property
    def first_tokens(self) -> list[float]:
        return [answer.first_token for answer in self.answers]

    def output_rate(self, begin: float = 0.0, end: float = 1.0) -> float:
        """Output tokens a second between two parts (0 to 1) of the load's time; what came after it does
        not count."""
        stamps = [at for answer in self.answers for at in answer.tokens]
        return sum(self._is_within(at, begin, end) for at in stamps) / (self.seconds * (end - begin))

    def training_rate(self, begin: float = 0.0, end: float = 1.0) -> float:
        """Fine-tuning tokens a second between two parts of the load's time.

        What a step trained counts as evenly spread over the time since the one before: a whole mini-batch may
        take seconds, and it would matter by how little the last one came too late.
        """
        low, high = (self.started + part * self.seconds for part in (begin, end))
        found, before = 0.0, self.started
        for at, pieces in groupby(sorted(self.trained), key=itemgetter(0)):
            inside = max(min(at, high) - max(before, low), 0.0)
            found += sum(tokens for _, tokens in pieces) * inside / max(at - before, 1e-9)
            before = at
        return found / (high - low)

    def overall_training_rate(self) -> float:
        """Fine-tuning tokens a second until the last answer was complete, so that requests pushed out beyond
        the load's time count, too. Training that is apart (`is_apart`) does not depend on answers."""
        last = max((a.tokens[-1] for a in self.answers if a.tokens), default=self.started)
        return self.training_rate(
            end=1.0 if self.is_apart else max(1.0, (last - self.started) / self.seconds)
        )

    def attainment(self, slo: SLO) -> float:
        """Share of all requests that had every token in time."""
        return sum(answer.keeps(slo) for answer in self.answers) / len(self.answers)

    def per_second(self) -> list[tuple[float, float, float]]:
        """(second, output tokens in it, fine-tuning tokens in it)."""
        whole = max(1, int(self.seconds))
        output, trained = [0.0] * whole, [0.0] * whole
        for answer in self.answers:
            for at in answer.tokens:
                if at - self.started < whole:
                    output[int(at - self.started)] += 1
        for at, tokens in self.trained:
            if at - self.started < whole:
                trained[int(at - self.started)] += tokens
        return list(zip(map(float, range(whole)), output, trained, strict=True))

    def _is_within(self, at: float, begin: float, end: float) -> bool:
        return begin * self.seconds <= at - self.started < end * self.seconds


Pressing = Callable[
    [float], float
]  # when the next request comes that does not bear a step of so many seconds


def nobody(seconds: float) -> float:
    """The `Pressing` without any such request."""
    return float("inf")


class LoadTarget(Protocol):
    """A machine that a workload is replayed on, with a clock of its own."""

    scheduler: Scheduler

    def clock(self) -> float:
        """Seconds."""

    def wait(self, seconds: float) -> None:
        """Lets time pass between two steps."""

    def ask(self, request: TimedRequest, arrival: float) -> Sequence:
        """Submits a request that arrived at `arrival`."""

    def cancel(self, answer: Sequence) -> None:
        """Ends an answer."""

    def start(self, job: TimedJob) -> Callable[[], None]:
        """Starts a job, and gives what cancels it."""

    def step(self, pressing: Pressing = ...) -> list[Event]:
        """One step, whose training stops where a request comes that does not bear to wait for it."""


def replay(target: LoadTarget, workload: Workload, patience: float = float("inf")) -> LoadResult:
    """Runs the target until every request has its answer; training goes on meanwhile if there is some.

    A request counts as arrived at its instant, even where a step was under way: what that step still took
    is part of its wait. A token counts when the step that made it has returned. A training token counts
    half on its way forward and half on its way back, layer by layer (`ours.tokens_trained`). Who has no
    answer `patience` seconds after the load is over is given up, and so are its jobs.
    """
    return _Replay(target, workload).until(workload.seconds + patience)


class _Replay:
    """A workload that is being replayed."""

    def __init__(self, target: LoadTarget, workload: Workload) -> None:
        self._target, self._workload = target, workload
        self._requests = sorted(workload.requests, key=lambda request: -request.at)  # the next one last
        self._jobs = sorted(workload.jobs, key=lambda job: -job.at)
        self._open: dict[int, tuple[AnswerTimes, Sequence]] = {}
        self._cancel_jobs: list[Callable[[], None]] = []
        self._load = LoadResult(target.clock(), workload.seconds)

    def until(self, end: float) -> LoadResult:
        """Runs until the load is over, or until `end` seconds after its beginning."""
        target, load = self._target, self._load
        used = time.process_time()
        while self._is_going_on and (now := target.clock()) < load.started + end:
            self._arrive(now - load.started)
            if target.scheduler.has_work:
                self._step()
            else:
                target.wait(max(0.0, self._next_at - (now - load.started)))
        load.finished_at = target.clock()
        load.processor = time.process_time() - used
        self._give_up()
        return load

    @property
    def _is_going_on(self) -> bool:
        is_early = bool(self._jobs) or self._target.clock() < self._load.started + self._workload.seconds
        return bool(self._requests or self._open) or (bool(self._workload.jobs) and is_early)

    @property
    def _next_at(self) -> float:
        coming = [line[-1].at for line in (self._requests, self._jobs) if line]
        return min(coming, default=self._workload.seconds)

    def _arrive(self, now: float) -> None:
        while self._jobs and self._jobs[-1].at <= now:
            self._cancel_jobs.append(self._target.start(self._jobs.pop()))
        while self._requests and self._requests[-1].at <= now:
            self._ask(self._requests.pop())

    def _ask(self, request: TimedRequest) -> None:
        arrival = self._load.started + request.at
        sequence = self._target.ask(request, arrival)
        kept = sequence in self._target.scheduler.requests.blocked_on_adapter
        answered = AnswerTimes(arrival, slo=request.slo, kept=kept)
        self._load.answers.append(answered)
        self._open[sequence.key] = answered, sequence

    def _step(self) -> None:
        events = self._target.step(self._pressing)
        now = self._target.clock()
        for event in events:
            if isinstance(event, TokenEvent) and event.token is not None:
                answered, sequence = self._open[event.key]
                answered.tokens.append(now)
                if event.finish_reason is not None:
                    answered.deferred = sequence.deferred
                    answered.deferred_first = sequence.deferred_first
                    del self._open[event.key]
            elif isinstance(event, StepDone):
                self._load.losses.append(event.updated.loss)
        if trained := tokens_trained(events):
            self._load.trained.append((now, trained))

    def _pressing(self, seconds: float) -> float:
        return self._load.started + next_pressing(reversed(self._requests), seconds)

    def _give_up(self) -> None:
        """Cancels what is left, so that the engine is free for another load. A request that came while the
        last step was under way has no answer either."""
        late = (AnswerTimes(self._load.started + one.at, slo=one.slo) for one in reversed(self._requests))
        self._load.answers.extend(late)
        for answered, sequence in self._open.values():
            answered.tokens.clear()
            self._target.cancel(sequence)
        for cancel in self._cancel_jobs:
            cancel()
        self._target.step()


def next_pressing(coming: Iterable[TimedRequest], seconds: float) -> float:
    """Arrival of the next request that stops the training of a step of so many seconds, among the next few;
    infinite for none."""
    pressing = (one.at for one in islice(coming, _LOOKED_AT) if not one.slo.bears(seconds))
    return next(pressing, float("inf"))


def tokens_trained(events: Iterable[Event]) -> float:
    """Tokens that a step trained: a row through all layers forward is half a token, and one back is the other
    half. The tail between the two ways is part of neither: at 16 layers it would add 1/32 to every rate."""
    ways = (Direction.TRAIN_FORWARD, Direction.BACKWARD)
    passed = (event for event in events if isinstance(event, TrainingProgress))
    return sum(event.rows for event in passed if event.direction in ways) / 2
