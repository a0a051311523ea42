"""Forms of answers in requests, by vLLM's names."""

from typing import Any

import pytest

from serving import Play, World

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "x"}]
FORMS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": {"type": "object"}}},
    {"structured_outputs": {"json": '{"type": "object"}'}},
    {"structured_outputs": {"json_object": True}},
    {"structured_outputs": {"regex": "a|b"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"grammar": 'start: "a"'}},
    {"guided_json": {"type": "object"}},
    {"guided_regex": "a|b"},
    {"guided_choice": ["a", "b"]},
    {"guided_grammar": 'start: "a"'},
]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    start = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    return {"model": "tiny", "max_tokens": 3, **start, **fields}


def test_both_names_ask_for_the_same(play: Play) -> None:
    async def story(world: World) -> None:
        for path in (CHAT, TEXT):
            for fields in FORMS:
                assert (await world.http.post(path, json=body_of(path, **fields))).status_code == 200, fields
        grammars = [sent.sampling.grammar for sent in world.submits()]
        assert all(grammars) and grammars[:10] == grammars[10:]
        json, text, free, regex, choice, grammar, *older = grammars[:10]
        assert json == text == free and older == [json, regex, choice, grammar]
        assert len({json, regex, choice, grammar}) == 4

    play(story)


INVALID: list[tuple[str, dict[str, Any]]] = [
    ("structured_outputs", {"structured_outputs": {}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}, "guided_regex": "a"}),
    ("guided_regex", {"guided_regex": "a", "guided_choice": ["a"]}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "("}}),
    ("structured_outputs.json", {"structured_outputs": {"json": "["}}),
    ("structured_outputs.x", {"structured_outputs": {"x": "["}}),
    ("guided_grammar", {"guided_grammar": "start: unknown"}),
    ("guided_json", {"guided_json": {"type": "nothing"}}),
    ("guided_choice", {"guided_choice": []}),
    (None, {"guided_choice": ["a"], "min_tokens": 1}),  # type: ignore[list-item]
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("param", "fields"), INVALID)
def test_a_bad_form_is_named(shared_play: Play, path: str, param: str, fields: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        answer = await world.http.post(path, json=body_of(path, **fields))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
        assert not world.submits()

    shared_play(story)


def test_a_form_beside_a_response_format_or_tools(shared_play: Play) -> None:
    async def story(world: World) -> None:
        both = body_of(CHAT, guided_regex="a", response_format={"type": "json_object"})
        answer = await world.http.post(CHAT, json=both)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "guided_regex"

    shared_play(story)
