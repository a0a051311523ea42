"""Request sources for the demo's acts: conversations, or the requests of a trace."""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from coserve.demo.figures import Phase
from coserve.demo.lessons import Lesson
from coserve.demo.load_generator import Conversations, RequestSource
from coserve.demo.trace import TraceArrivals, TraceBacklog, TraceLoad, describe
from coserve.workload.traces import ScaledTrace

# Share of the measured capacity at which a trace's requests arrive. Training fills each step up to the bound
# between tokens: answers take several times as long as alone, so that many times more are under way at once.
OFFERED: Final = 0.25


class RequestSources(Protocol):
    """Makes the request source of each act: the same load, with adapters or without."""

    def alone(self, lessons: Sequence[Lesson]) -> RequestSource:
        """Requests for the base alone."""
        ...

    def taught(self, lessons: Sequence[Lesson]) -> RequestSource:
        """The same requests, some of them for the adapters of these lessons while these train."""
        ...


class ConversationSources:
    """Conversations, `seats` of them at any time."""

    def __init__(self, seats: int) -> None:
        self._seats = seats

    def alone(self, lessons: Sequence[Lesson]) -> RequestSource:
        return Conversations(self._seats, lessons, adapted=False)

    def taught(self, lessons: Sequence[Lesson]) -> RequestSource:
        return Conversations(self._seats, lessons)


class TraceSources:
    """Requests of a trace, whose arrivals are scaled to the machine once its capacity is known."""

    def __init__(self, load: TraceLoad, text: Sequence[int], seats: int) -> None:
        self._load, self._text, self._seats = load, text, seats
        self._scaled: ScaledTrace = load.at_rate(1.0)

    def backlog(self) -> RequestSource:
        """Source of as many requests at once as there are seats, to find the capacity."""
        return TraceBacklog(self._scaled, self._text, self._seats)

    def fit(self, capacity: Phase) -> tuple[str, dict[str, Any]]:
        """Scales the arrivals to the wanted share of the capacity; a sentence and figures about it."""
        tokens = capacity.output_tokens_per_second + capacity.prompt_tokens_per_second
        requests = max(tokens, 1.0) / self._load.tokens_per_request
        self._scaled = self._load.at_rate(OFFERED * requests)
        return describe(self._scaled, self._load, requests)

    def alone(self, lessons: Sequence[Lesson]) -> RequestSource:
        return TraceArrivals(self._scaled, self._text)

    def taught(self, lessons: Sequence[Lesson]) -> RequestSource:
        return TraceArrivals(self._scaled, self._text, [lesson.adapter for lesson in lessons])
