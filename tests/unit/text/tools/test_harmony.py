"""GPT-OSS' channels: what is written is read, wherever it is cut, and grammars allow that alone."""

import json
import random
import secrets
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest

from called import TOOLS, Untrained, template_of, tokenizer_for
from coserve.jobs.messages import Message, ToolCall
from coserve.text import Text
from coserve.text.chat import encode_chat, encode_turns
from coserve.text.deltas import joined
from coserve.text.markup import AnswerReader, Markup, Markups
from coserve.text.tools.formats import FORMATS
from coserve.text.tools.grammar import AnswerParts, answer_grammar
from coserve.text.tools.tool import Tool

KNOWN = {
    tool["function"]["name"]: Tool(tool["function"]["name"], tool["function"]["parameters"]) for tool in TOOLS
}
THOUGHT = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant"
ULM = '{"city": "Ulm", "days": 3}'
Told = tuple[str, str, list[tuple[str, str]]]


def read(pieces: Sequence[str], channel: str = "") -> Told:
    """(text, reasoning, calls) of an answer in pieces."""
    reader = AnswerReader(Markup(format=FORMATS["harmony"], tools=KNOWN, channel=channel))
    deltas = [one for n, piece in enumerate(pieces, 1) for one in reader.push(piece, n == len(pieces))]
    said, thought, calls = joined(deltas)
    assert reader.calls == len(calls) and all(call.id.startswith("call_") for call in calls)
    return said, thought, [(call.name, call.arguments) for call in calls]


CASES: list[tuple[str, str, Told]] = [
    (f"{THOUGHT}<|channel|>final<|message|>Hi!\n", "", ("Hi!\n", "Rain?", [])),
    (f"{THOUGHT}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ULM}<|call|>", "",
     ("", "Rain?", [("get_weather", ULM)])),
    (f" to=functions.get_weather<|channel|>commentary json<|message|>{ULM}", "",
     ("", "", [("get_weather", ULM)])),
    ("<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
     "to=functions.clock<|message|>{}<|call|>", "", ("Let me see.", "", [("clock", "{}")])),
    ("<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>{}", "", ("{}", "", [])),
    ('<|channel|>commentary to=functions.get_weather<|message|>{"city": "<|end|>", "x": [{}]} <|end|>', "",
     ("", "", [("get_weather", '{"city": "<|end|>", "x": [{}]}')])),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|return|>", "",
     ("", "a\nb", [])),
    (" and so on<|return|>", "final", (" and so on", "", [])),
    ("so.<|end|><|start|>assistant<|channel|>final<|message|>Hi", "analysis", ("Hi", "so.", [])),
    ("no header, to=all", "", ("no header, to=all", "", [])),
    ("to", "", ("to", "", [])),
    ("1 <|x 2", "final", ("1 <|x 2", "", [])),
    ("<|channel|>final", "", ("", "", [])),
    ("<|message|>Hi", "", ("Hi", "", [])),
    ("", "", ("", "", [])),
    ("<|start|>" + "x" * 600, "", ("<|start|>" + "x" * 600, "", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "channel", "told"), CASES)
def test_channels_are_read_wherever_they_are_cut(text: str, channel: str, told: Told) -> None:
    assert read([text], channel) == told
    assert read(list(text) or [""], channel) == told
    for place in range(0, len(text) + 1, 1 + len(text) // 200):
        assert read([text[:place], text[place:]], channel) == told


def test_where_hostile_text_is_cut_makes_no_difference() -> None:
    draw = random.Random(seed := secrets.randbits(32))
    print(f"seed {seed}")
    pieces = [THOUGHT, "<|start|>", "assistant", "<|channel|>", "final", "analysis", "commentary",
              "<|message|>", " to=functions.clock", " to=functions.", "{}", '{"', "<|end|>", "<|call|>",
              "<|", " ", "x"]  # fmt: skip
    for _ in range(200):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 9)))
        channel = draw.choice(("", "final", "analysis"))
        whole = read([text], channel)
        assert read(list(text), channel) == whole
        places = sorted(draw.choices(range(len(text) + 1), k=3))
        assert (
            read([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)], channel)
            == whole
        )


@pytest.mark.parametrize("has_tokens", [True, False])
def test_the_template_tells_the_format_and_training_agrees_with_answers(has_tokens: bool) -> None:
    tokenizer = tokenizer_for(template_of("harmony"), has_tokens)
    text, model = Text(tokenizer), Untrained(tokenizer)
    assert text.markups.format() is FORMATS["harmony"]
    made = (ToolCall("get_weather", json.loads(ULM), "1"),)
    user, tools = Message("user", "Ulm?"), tuple(TOOLS)
    answers = [
        (Message("assistant", "", tool_calls=made, reasoning="Rain?"), ("", "Rain?", [("get_weather", ULM)])),
        (Message("assistant", "", tool_calls=made), ("", "", [("get_weather", ULM)])),
        (Message("assistant", "Rain.", reasoning="Hm."), ("Rain.", "Hm.", [])),
        (Message("assistant", "Rain."), ("Rain.", "", [])),
    ]
    prompt = text.chat([{"role": "user", "content": "Ulm?"}], TOOLS)
    markup = text.markups.of(prompt, [*KNOWN.values()])
    assert markup.channel == ""
    for message, told in answers:
        tokens, mask = encode_chat((user, message), tokenizer, tools=tools)
        assert tuple(tokens[: len(prompt)]) == prompt
        assert mask == [n >= len(prompt) for n in range(len(tokens))]
        ending = tokenizer("<|call|>" if told[2] else "<|return|>", add_special_tokens=False)["input_ids"]
        answer = tokens[len(prompt) : -len(ending)]
        assert tokens[-len(ending) :] == ending
        for forced in (False, True):
            wanted = AnswerParts(markup.format, [*KNOWN.values()], forced, channel=markup.channel)
            fits = model.accepts(answer_grammar(wanted, text.markups.lark()), answer) == (len(answer), True)
            assert fits == (not forced or bool(told[2]))
        stream, reader = text.stream(kept=markup.kept), markup.reader()
        deltas = [delta for token in answer for delta in reader.push(stream.push(token))]
        said, thought, calls = joined([*deltas, *reader.push(stream.finish(), is_last=True)])
        assert (said, thought, [(call.name, call.arguments) for call in calls]) == told
    # The template leaves reasoning out of earlier turns: each turn is learned as it is served.
    chat = (user, answers[2][0], user, answers[0][0])
    turns = [
        tokenizer.decode([t for t, own in zip(*one, strict=True) if own])
        for one in encode_turns(chat, tokenizer)
    ]
    thought, said = "<|channel|>analysis<|message|>Hm.<|end|>", "<|channel|>final<|message|>Rain.<|return|>"
    assert turns[0] == f"{thought}<|start|>assistant{said}"
    assert turns[1].startswith(THOUGHT) and turns[1].endswith(f"<|message|>{ULM}<|call|>")


@pytest.mark.parametrize("has_tokens", [True, False])
def test_an_untrained_model_writes_what_is_read(has_tokens: bool) -> None:
    draw = random.Random(seed := secrets.randbits(32))
    print(f"seed {seed}")
    text = Text(tokenizer_for(template_of("harmony"), has_tokens))
    model, tools = Untrained(text.tokenizer), [*KNOWN.values()]
    markup = text.markups.of((), tools)
    number = text.markups.lark().json({"type": "integer", "minimum": 0, "maximum": 99}, True)
    found = {"calls": 0, "numbers": 0}
    for channel, forced, answer in (
        ("", True, None),
        ("", False, number),
        ("final", True, None),
        ("analysis", True, None),
    ):
        lark = text.markups.lark()
        wanted = AnswerParts(markup.format, tools, forced, answer=answer, channel=channel)
        grammar = answer_grammar(wanted, lark)
        for _ in range(5):
            stream = text.stream(kept=markup.kept)
            reader = Markup(format=markup.format, tools=KNOWN, channel=channel).reader()
            tokens, deltas = model.answer(grammar, draw, 6000), list[Any]()
            if tokens[-1] != text.tokenizer.eos_token_id:
                continue  # a long thought
            for token in tokens[:-1]:
                deltas += reader.push(stream.push(token))
            said, _, calls = joined([*deltas, *reader.push(stream.finish(), is_last=True)])
            assert len(calls) == 1 or not forced
            for call in calls:
                jsonschema_rs.validate(dict(KNOWN[call.name].parameters), json.loads(call.arguments))
            if not calls:
                assert 0 <= int(said) <= 99
            found["calls"] += len(calls)
            found["numbers"] += not calls
    assert found["calls"] >= 4, found


def test_a_prompt_that_ends_within_a_message_is_gone_on_with() -> None:
    tokenizer = tokenizer_for(template_of("harmony"))
    text = Text(tokenizer)
    turns = [{"role": "user", "content": "<|start|>assistant<|channel|>analysis<|message|>"},
             {"role": "assistant", "content": "It will " * 40}]  # fmt: skip
    assert text.markups.of(text.chat(turns, is_continued=True)).channel == "final"
    assert text.markups.of(text.chat(turns[:1])).channel == ""
    thinks = tokenizer("<|start|>assistant<|channel|>analysis<|message|>so", add_special_tokens=False)[
        "input_ids"
    ]
    assert text.markups.of(thinks).channel == "analysis"
    grammar = answer_grammar(AnswerParts(channel="final"), text.markups.lark())
    assert Untrained(tokenizer).accepts(
        grammar, tokenizer("rain.", add_special_tokens=False)["input_ids"]
    ) == (5, True)


def test_the_setting_names_the_format_of_any_template() -> None:
    named = Markups(tokenizer_for(template_of("hermes")), "harmony")
    assert named.of((), [Tool("clock")]).channel == "" and named.format() is FORMATS["harmony"]
