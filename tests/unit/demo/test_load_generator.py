"""The requests of the demo's clients, and the records of their answers."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from coserve.core.events import Event, Finished, TokenEvent
from coserve.core.request import SLO, FinishReason, SamplingParams
from coserve.demo.lessons import HeldOut, Lesson
from coserve.demo.load_generator import Conversations, DemoRequest, LoadGenerator
from coserve.train.example import Example

EXAMPLE = Example((1, 2), (2, -100))
QUESTION = HeldOut(({"role": "user", "content": "Who?"},), "Me.", EXAMPLE)
LESSONS = [Lesson(name, "speaks", (EXAMPLE,), (QUESTION,), exact=True) for name in ("a", "b")]


def test_every_seat_talks_and_nobody_asks_twice_at_once() -> None:
    talks = Conversations(8)
    asks = list(talks.due(0.0))
    assert sorted(request.seat for request in asks) == list(range(8))
    assert {request.adapter for request in asks} == {None}
    assert not list(talks.due(1.0))


def test_a_conversation_goes_on_with_what_was_said() -> None:
    talks = Conversations(1)
    (request,) = talks.due(0.0)
    lengths = []
    for _ in range(20):
        talks.answered(request, "Indeed.")
        (following,) = talks.due(0.0)
        goes_on = len(following.prompt) > len(request.prompt)
        if goes_on:
            said = following.prompt[len(request.prompt)]
            assert said == {"role": "assistant", "content": "Indeed."}
        lengths.append(goes_on)
        request = following
    assert True in lengths and False in lengths  # turns of one conversation, and new conversations


def test_the_last_seats_talk_to_the_adapters() -> None:
    by_seat = {request.seat: request for request in Conversations(8, LESSONS).due(0.0)}
    assert [by_seat[seat].adapter for seat in range(8)] == [None] * 6 + ["b", "a"]
    assert by_seat[7].question == "Who?"


def test_acts_with_and_without_adapters_ask_the_same() -> None:
    """Also where answers come in another order, at other times, and say something else."""
    heard = []
    for adapted, order in ((False, 1), (True, -1)):
        talks, seats = Conversations(4, LESSONS, adapted), dict[int, list[tuple[str, SamplingParams]]]()
        for turn in range(12):
            for request in list(talks.due(float(turn)))[::order]:
                seats.setdefault(request.seat, []).append((request.question, request.sampling))
                assert (request.adapter is not None) == (adapted and request.seat >= 2)
                talks.answered(request, f"{turn} {adapted}")
        heard.append(seats)
    assert heard[0] == heard[1]
    assert len({sampling.seed for _, sampling in heard[0][0]}) == 12


def test_a_single_seat_is_left_to_the_base() -> None:
    (request,) = Conversations(1, LESSONS).due(0.0)
    assert request.adapter is None


class Engine:
    """An engine whose answers are scripted: it only hands out handles and tells the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handles: list[Any] = []

    def clock(self) -> float:
        return self.now

    def generate(
        self, prompt: Any, adapter: Any, sampling: Any, slo: Any, arrival: float | None, scope: str
    ) -> Any:
        request = SimpleNamespace(arrival=self.now if arrival is None else arrival, adapter=adapter)
        sequence = SimpleNamespace(key=len(self.handles), request=request)
        handle = SimpleNamespace(sequence=sequence, finish_reason=None, text="", slo=slo, cancelled=False)
        handle.scope = scope
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        self.handles.append(handle)
        return handle


class Once:
    """A source that asks a list of things and remembers the answers."""

    def __init__(self, asks: Iterable[DemoRequest]) -> None:
        self._asks = list(asks)
        self.exchange: list[tuple[int, str]] = []

    def due(self, now: float) -> Iterable[DemoRequest]:
        while self._asks:
            yield self._asks.pop()

    def answered(self, request: DemoRequest, text: str) -> None:
        self.exchange.append((request.seat, text))


def crowd_of(*seats: int, slo: SLO = SLO()) -> tuple[Engine, Once, LoadGenerator]:
    """A crowd whose seats have asked already."""
    engine = Engine()
    source = Once(DemoRequest(seat, "Hello", "Hello", None, at=None) for seat in seats)  # type: ignore[arg-type]
    clients = LoadGenerator(engine, source, slo, "act-1")  # type: ignore[arg-type]
    clients.submit()
    return engine, source, clients


def token(key: int, reason: FinishReason | None = None) -> Event:
    return TokenEvent(key, f"req-{key}", token=5, finish_reason=reason)


def test_tokens_are_timed_when_the_caller_has_them() -> None:
    engine, source, clients = crowd_of(3, slo=SLO(first_token=1.0, between_tokens=0.5))
    assert engine.handles[0].slo == SLO(first_token=1.0, between_tokens=0.5)
    assert engine.handles[0].scope == "act-1"
    engine.now = 1.0
    clients.take([token(0)])
    engine.now = 1.25
    engine.handles[0].finish_reason, engine.handles[0].text = FinishReason.STOP, "Hi."
    clients.take([token(0, FinishReason.STOP)])
    assert (clients.latencies.firsts, clients.latencies.gaps) == ([1.0], [0.25])
    assert clients.latencies.kept == 1
    assert source.exchange == [(3, "Hi.")]
    assert clients.under_way() == ()
    assert clients.completed()[0].answer == "Hi."


def test_an_answer_that_ends_between_two_steps_is_noticed() -> None:
    engine, source, clients = crowd_of(0)
    engine.handles[0].finish_reason = FinishReason.STOP
    clients.take([Finished(0, "req-0", FinishReason.STOP)])
    assert source.exchange == [(0, "")]


def test_events_of_others_are_none_of_the_crowds_business() -> None:
    _, _, clients = crowd_of(0)
    clients.take([token(77), Finished(78, "req-78", FinishReason.CANCELLED)])
    assert clients.latencies.tokens == 0


def test_who_leaves_is_cancelled_and_never_counted() -> None:
    engine, source, clients = crowd_of(0, 1)
    clients.cancel_all()
    assert all(handle.cancelled for handle in engine.handles)
    clients.take([Finished(0, "req-0", FinishReason.CANCELLED)])
    assert clients.latencies.answers == 0 and not source.exchange
