"""Puts a timed load on an engine and watches the wall clock, not the scheduler's own book."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from coserve.bench.ours import greedy
from coserve.bench.workloads import TimedRequest
from coserve.core.events import TokenEvent, TrainingProgress
from coserve.core.request import SLO
from coserve.engine.engine import Engine

_NAP = 0.001  # seconds; the wait for an arrival is cut into so many


@dataclass(slots=True)
class Answered:
    """When a request arrived and when the caller could see each of its tokens; engine's clock, seconds."""

    arrival: float
    tokens: list[float] = field(default_factory=list)

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
        """Whether the first token and every gap between two tokens came within their bounds."""
        first, between = slo.first_token, slo.between_tokens
        if first is not None and self.first_token > first:
            return False
        return between is None or all(gap <= between for gap in self.gaps)


@dataclass(slots=True)
class Load:
    """What happened while a load ran from `started` for `seconds`, and until its last answer was complete."""

    started: float
    seconds: float
    answers: list[Answered] = field(default_factory=list)
    trained: list[tuple[float, float]] = field(default_factory=list)  # (when, tokens)

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
        """Fine-tuning tokens a second between two parts of the load's time."""
        tokens = sum(tokens for at, tokens in self.trained if self._is_within(at, begin, end))
        return tokens / (self.seconds * (end - begin))

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


def serve(engine: Engine, requests: Sequence[TimedRequest], seconds: float, slo: SLO = SLO()) -> Load:
    """Runs the engine until every request has its answer; training goes on meanwhile if there is some.

    A request counts as arrived at its instant, even where a step was under way: what that step still took
    is part of its wait. A token counts when the step that made it has returned. A training token counts
    half when its rows were kept and half when they came back, layer by layer.
    """
    load = Load(engine.clock(), seconds)
    answers: dict[int, Answered] = {}
    coming = list(reversed(requests))
    open_answers = 0
    while coming or open_answers:
        now = engine.clock()
        while coming and load.started + coming[-1].at <= now:
            request = coming.pop()
            arrival = load.started + request.at
            sampling = greedy(request.answer)
            handle = engine.generate(request.prompt, sampling=sampling, slo=slo, arrival=arrival)
            answers[handle.sequence.key] = Answered(arrival)
            open_answers += 1
        if not engine.scheduler.has_work:
            time.sleep(min(_NAP, max(0.0, load.started + coming[-1].at - now)))
            continue
        events = engine.step()
        now = engine.clock()
        for event in events:
            if isinstance(event, TokenEvent) and event.token is not None:
                answers[event.key].tokens.append(now)
                open_answers -= event.finish_reason is not None
            elif isinstance(event, TrainingProgress):
                load.trained.append((now, event.rows / 2))
    load.answers = list(answers.values())
    return load
