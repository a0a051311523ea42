"""Requests of the demo: questions at random instants, or those of a trace. None waits for an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final, Protocol

from coserve.core.request import SLO, SamplingParams
from coserve.demo.lessons import Lesson
from coserve.text.text import Text
from coserve.tiny.world import KINDS
from coserve.workload.arrivals import poisson_times
from coserve.workload.requests import TimedRequest

LONGEST_ANSWER: Final = 64
STORY: Final = "Tell me a story."
ADAPTED: Final = 4  # every fourth request is for an adapter, in turn


@dataclass(frozen=True, slots=True)
class DemoRequest(TimedRequest):
    """A request of the demo. Its `adapter` answers where it is in training, else an untrained one does.
    `question` is the text shown on screen."""

    question: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)


class RequestSource(Protocol):
    """Makes the requests of a load, the same ones every time."""

    def requests(self, rate: float, seconds: float) -> list[DemoRequest]:
        """Requests of `seconds` seconds, `rate` a second."""
        ...


def at_once(source: RequestSource, count: int) -> list[DemoRequest]:
    """The first `count` requests of a source, all from the beginning on and for the base."""
    return [replace(request, at=0.0, adapter=None) for request in source.requests(count, 1.0)]


def adapter_of(number: int, lessons: Sequence[Lesson]) -> Lesson | None:
    """The lesson whose adapter the request of this number is for; None for the base."""
    turn, rest = divmod(number, ADAPTED)
    return None if rest else lessons[turn % len(lessons)]


class Questions:
    """Stories and questions about the small world for the base, and held-out questions of the lessons for
    their adapters, at the instants of a Poisson process."""

    def __init__(self, text: Text, lessons: Sequence[Lesson], slo: SLO) -> None:
        self._text, self._lessons, self._slo = text, lessons, slo

    def requests(self, rate: float, seconds: float) -> list[DemoRequest]:
        """See `RequestSource`."""
        return [self._request(number, at) for number, at in enumerate(poisson_times(rate, seconds))]

    def _request(self, number: int, at: float) -> DemoRequest:
        draw = Random(f"question/{number}")
        lesson = adapter_of(number, self._lessons)
        if lesson is not None:
            asked = draw.choice(lesson.held_out)
            prompt, question, sampling = asked.prompt, asked.text, SamplingParams(max_tokens=LONGEST_ANSWER)
        else:
            is_story = draw.random() < 0.5
            turns = KINDS[draw.choice(list(KINDS))](draw, "held_out").prompt
            prompt = [{"role": "user", "content": STORY}] if is_story else turns
            question, seed = prompt[-1]["content"], draw.getrandbits(32)
            sampling = SamplingParams(max_tokens=LONGEST_ANSWER, temperature=0.7, top_p=0.95, seed=seed)
        tokens = self._text.encode(prompt) if isinstance(prompt, str) else self._text.chat(prompt)  # type: ignore[arg-type]
        name = None if lesson is None else lesson.adapter
        return DemoRequest(at, tokens, LONGEST_ANSWER, name, self._slo, question, sampling)
