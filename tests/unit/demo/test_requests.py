"""Requests of the demo: the same ones in every way, whatever the answers are."""

from collections.abc import Mapping, Sequence
from typing import Any

from coserve.core.request import SLO
from coserve.demo.lessons import HeldOut, Lesson
from coserve.demo.requests import ADAPTED, STORY, Questions, at_once
from coserve.train.example import Example

EXAMPLE = Example((1, 2), (2, -100))
QUESTION = HeldOut(({"role": "user", "content": "Who?"},), "Me.", EXAMPLE)
TEXT = HeldOut("Once upon", " a time.", EXAMPLE)
LESSONS = [
    Lesson("a", "speaks", (EXAMPLE,), (QUESTION,), exact=True),
    Lesson("b", "goes on", (EXAMPLE,), (TEXT,), exact=False),
]
BOUND = SLO(slowdown=1.5)


class Letters:
    """A tokenizer of characters."""

    def encode(self, prompt: str) -> tuple[int, ...]:
        return tuple(map(ord, prompt))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return self.encode("|".join(message["content"] for message in messages) + ":")


def questions() -> Questions:
    text: Any = Letters()
    return Questions(text, LESSONS, BOUND)


def test_a_load_is_the_same_every_time_and_arrives_at_its_rate() -> None:
    asked = questions().requests(8.0, 10.0)
    assert asked == questions().requests(8.0, 10.0)
    assert len(asked) == 80 and all(0.0 <= request.at < 10.0 for request in asked)
    assert [request.at for request in asked] == sorted(request.at for request in asked)
    assert {request.slo for request in asked} == {BOUND}


def test_every_fourth_request_is_for_an_adapter_in_turn() -> None:
    asked = questions().requests(9.0, 1.0)
    assert [request.adapter for request in asked] == ["a", None, None, None, "b", None, None, None, "a"]
    letters = Letters()
    assert asked[0].prompt == letters.encode("Who?:") and asked[0].question == "Who?"
    assert asked[ADAPTED].prompt == letters.encode("Once upon")


def test_the_base_is_asked_for_stories_and_about_the_world_with_seeds() -> None:
    asked = [request for request in questions().requests(100.0, 1.0) if request.adapter is None]
    stories = [request for request in asked if request.question == STORY]
    assert 20 < len(stories) < len(asked) - 20
    assert len({request.sampling.seed for request in asked}) == len(asked)


def test_a_backlog_is_the_same_requests_at_once_and_for_the_base() -> None:
    waiting = at_once(questions(), 12)
    assert {request.at for request in waiting} == {0.0} and {r.adapter for r in waiting} == {None}
    assert [r.prompt for r in waiting] == [r.prompt for r in questions().requests(12.0, 1.0)]
