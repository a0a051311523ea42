"""Clients of the demo: submit requests to the engine and time every token."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from coserve.core.events import Event, Finished, TokenEvent
from coserve.core.request import SLO, SamplingParams
from coserve.demo.latency import Latencies
from coserve.demo.lessons import Lesson
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine, Prompt
from coserve.tiny.world import KINDS

LONGEST_ANSWER: Final = 128
TURNS: Final = (2, 3, 4)  # questions that one person asks before somebody new comes
STORY: Final = "Tell me a story."


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request of one seat. `at` is its arrival, None for now; `question` is the text shown on screen."""

    seat: int
    prompt: Prompt
    question: str
    sampling: SamplingParams
    adapter: str | None = None
    at: float | None = None


class RequestSource(Protocol):
    """Source of the demo's requests."""

    def due(self, now: float) -> Iterator[DemoRequest]:
        """Requests that arrive by `now`, engine's clock, seconds."""
        ...

    def answered(self, request: DemoRequest, text: str) -> None:
        """Receives a complete answer."""
        ...


@dataclass(slots=True)
class _Person:
    """A conversation so far and how many questions are still to come."""

    messages: list[dict[str, str]]
    left: int


class Conversations:
    """Simulates `seats` simultaneous conversations; a new one starts as soon as one has no more questions.

    The last seats ask the held-out questions of `lessons`, one each: of their adapters, also while these are
    being trained, or of the base where not `adapted`. Everyone else asks the base for stories and about the
    small world, turn after turn. What a seat asks, and the seeds of its answers, do not depend on when
    answers come or on `adapted`: two acts have the same load, of which the faster one has more.
    """

    def __init__(self, seats: int, lessons: Sequence[Lesson] = (), adapted: bool = True) -> None:
        self._random = [Random(f"conversations/{seat}") for seat in range(seats)]
        self._adapted = adapted
        self._free = deque(range(seats))
        self._people: dict[int, _Person] = {}
        taught = lessons[: max(seats - 1, 0)]
        self._taught = {seats - 1 - i: lesson for i, lesson in enumerate(taught)}

    def due(self, now: float) -> Iterator[DemoRequest]:
        while self._free:
            seat = self._free.popleft()
            yield self._pupil(seat) if seat in self._taught else self._next_turn(seat)

    def answered(self, request: DemoRequest, text: str) -> None:
        self._free.append(request.seat)
        person = self._people.get(request.seat)
        if person is not None:
            person.messages.append({"role": "assistant", "content": text})

    def _pupil(self, seat: int) -> DemoRequest:
        """A held-out question, to an adapter in training or to the base."""
        lesson = self._taught[seat]
        question = self._random[seat].choice(lesson.held_out)
        sampling = SamplingParams(max_tokens=LONGEST_ANSWER)
        adapter = lesson.adapter if self._adapted else None
        return DemoRequest(seat, question.prompt, question.text, sampling, adapter)

    def _next_turn(self, seat: int) -> DemoRequest:
        draw = self._random[seat]
        person = self._people.get(seat)
        if person is None or not person.left:
            person = self._people[seat] = _Person([], draw.choice(TURNS))
        person.left -= 1
        if draw.random() < 0.5:
            turns = [{"role": "user", "content": STORY}]
        else:
            turns = KINDS[draw.choice(list(KINDS))](draw, "held_out").prompt
        person.messages += turns
        seed = draw.getrandbits(32)
        sampling = SamplingParams(max_tokens=LONGEST_ANSWER, temperature=0.7, top_p=0.95, seed=seed)
        return DemoRequest(seat, tuple(person.messages), turns[-1]["content"], sampling)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer so far, by the base or a version of an adapter."""

    who: str
    question: str
    answer: str
    adapted: bool


@dataclass(frozen=True, slots=True)
class _PendingAnswer:
    """An answer under way."""

    request: DemoRequest
    handle: Completion

    def exchange(self) -> Exchange:
        version = self.handle.sequence.request.adapter
        return Exchange(version or "base", self.request.question, self.handle.text, version is not None)


class LoadGenerator:
    """Submits a source's requests to an engine, and measures the answers.

    Prompts share what they have in common with others of one `scope` alone: what an act has computed does
    not make the next one's answers faster.
    """

    def __init__(self, engine: Engine, source: RequestSource, slo: SLO = SLO(), scope: str = "") -> None:
        self._engine, self._source, self._slo, self._scope = engine, source, slo, scope
        self.latencies = Latencies(slo)
        self._pending: dict[int, _PendingAnswer] = {}
        self._ended: deque[Exchange] = deque(maxlen=8)  # newest answers, for the eye

    def submit(self) -> None:
        """Submits the requests that are due."""
        for request in self._source.due(self._engine.clock()):
            handle = self._engine.generate(
                request.prompt, request.adapter, request.sampling, self._slo, request.at, scope=self._scope
            )
            key = handle.sequence.key
            self._pending[key] = _PendingAnswer(request, handle)
            self.latencies.asked(key, handle.sequence.request.arrival)

    def take(self, events: Iterable[Event]) -> None:
        """Takes in the events of a step; tokens are timed when the caller has them."""
        now = self._engine.clock()
        for event in events:
            if isinstance(event, TokenEvent) and event.token is not None and event.key in self._pending:
                self.latencies.token(event.key, now)
        for key in [e.key for e in events if isinstance(e, TokenEvent | Finished) and e.key in self._pending]:
            pending = self._pending[key]
            if pending.handle.finish_reason is not None:
                del self._pending[key]
                self.latencies.ended(key, now)
                self._ended.append(pending.exchange())
                self._source.answered(pending.request, pending.handle.text)

    def time_to(self, answers: int, elapsed: float) -> float:
        """Seconds until `answers` are complete, at the pace of `elapsed` seconds; infinite before one is."""
        done = self.latencies.answers
        return (answers - done) * elapsed / done if done else float("inf")

    def cancel_all(self) -> None:
        """Cancels all requests, which frees their pages."""
        for pending in self._pending.values():
            pending.handle.cancel()
        self._pending.clear()

    def under_way(self) -> tuple[Exchange, ...]:
        """Answers under way, those of adapters first."""
        ordered = sorted(
            self._pending.values(),
            key=lambda pending: (pending.request.adapter is None, pending.request.seat),
        )
        return tuple(pending.exchange() for pending in ordered)

    def completed(self) -> tuple[Exchange, ...]:
        """The newest complete answers, newest first."""
        return tuple(reversed(self._ended))
