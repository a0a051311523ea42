"""Formats of calls: what is written is read, wherever it is cut, and grammars allow that alone."""

import json
import random
import secrets
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest

from called import ALL, CLOCK, PARAMETERS, TOOLS, Calls, Untrained, template_of, tokenizer_for, written
from coserve.errors import ConfigError, DataError
from coserve.jobs.messages import Message, ToolCall
from coserve.text import Text
from coserve.text.chat import encode_chat
from coserve.text.deltas import CallBegun, joined
from coserve.text.markup import AnswerReader, Markup, Markups
from coserve.text.tools.formats import FORMATS, named_format
from coserve.text.tools.grammar import AnswerParts, answer_grammar
from coserve.text.tools.tool import Tool

TEXTS = {"properties": {"text": {"type": "string"}, "parts": {"type": "array"}, "any": {}}}
KNOWN = {
    "get_weather": Tool("get_weather", PARAMETERS),
    "clock": Tool("clock"),
    "say.it": Tool("say.it", TEXTS),
}


def read(format: str, pieces: Sequence[str], ends: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """(text, calls) of an answer in pieces."""
    reader, deltas = AnswerReader(Markup(format=FORMATS[format], tools=KNOWN)), list[Any]()
    for number, piece in enumerate(pieces, 1):
        deltas += reader.push(piece, ends and number == len(pieces))
    said, thought, calls = joined(deltas)
    assert not thought and [call.index for call in deltas if isinstance(call, CallBegun)] == [
        *range(len(calls))
    ]
    assert len({call.id for call in calls}) == len(calls) == reader.calls
    return said, [(call.name, call.arguments) for call in calls]


def drawn(draw: random.Random, is_xml: bool) -> Calls:
    """Some calls with hostile values; those between tags cannot hold the tag that ends them."""
    texts = ['"', "\\", "{", "}}", "]", "<", "</tool", "<tool_call>", "é", "\n", "[TOOL_CALLS]", "; ", " "]
    calls = []
    for _ in range(draw.randint(1, 3)):
        text = "".join(draw.choices(texts, k=draw.randint(0, 6)))
        values: dict[str, Any] = {
            "text": text,
            "parts": [text, 1, {"a": None}],
            "any": draw.choice([1.5, True, []]),
        }
        names = [name for name in values if draw.random() < 0.7]
        calls.append(
            ("say.it", {name: values[name] for name in names}) if draw.random() < 0.8 else ("clock", {})
        )
    return calls


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ALL)
def test_calls_are_read_as_they_were_written_wherever_they_are_cut(name: str) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw, format = random.Random(seed), FORMATS[name]
    for _ in range(12):
        calls = drawn(draw, name in ("qwen3_coder", "glm45", "minimax_m2"))
        said = draw.choice(["", "Let me <see> [it", "{x", "a\n "]) if format.syntax.anywhere else ""
        text = said + written(format, calls)
        whole = read(name, [text])
        assert whole[0] == said.rstrip()
        assert [(called, json.loads(arguments)) for called, arguments in whole[1]] == [*calls]
        assert read(name, list(text)) == whole
        for place in range(len(text) + 1):
            assert read(name, [text[:place], text[place:]]) == whole
            assert read(name, [text[:place]]) == read(name, list(text[:place]) or [""])  # where it is cut off
            cut = read(name, [text[:place]])[1]
            assert all(one[0] == other[0] for one, other in zip(cut, whole[1], strict=False))
            assert all(other.startswith(one) for (_, one), (_, other) in zip(cut, whole[1], strict=False))
            assert not format.syntax.anywhere or format.syntax.marker not in read(name, [text[:place]])[0]


@pytest.mark.parametrize("name", ALL)
def test_hostile_text_is_told_whole_and_the_same_wherever_it_is_cut(name: str) -> None:
    """Nothing is lost of a text that is no call."""
    syntax, seed = FORMATS[name].syntax, secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    call = written(FORMATS[name], [("clock", {})])
    pieces = [syntax.marker, syntax.marker[:3], syntax.after, *"x{}", syntax.between, syntax.closing, call,
              " ", "\n", call[:-4], call.replace("clock", "unknown"), '{"name": "', "clock", '"']  # fmt: skip
    for _ in range(60):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 7)))
        whole = read(name, [text])
        for _ in range(8):
            places = sorted(draw.choices(range(len(text) + 1), k=3))
            cut = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
            assert read(name, cut) == whole
        assert read(name, list(text)) == whole
    for text in (call.replace("clock", "unknown"), "no call at all", "1 < 2"):
        assert read(name, [text]) == (text, [])
    if syntax.anywhere and name != "mistral_names":
        assert read(name, [f"{syntax.marker} and {syntax.marker}"])[0] == f"{syntax.marker} and"


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_the_template_tells_the_format_and_training_agrees_with_answers(name: str, has_tokens: bool) -> None:
    """A record's tokens are those of the request and of an answer that the grammar allows and that is read
    as the record's calls."""
    tokenizer = tokenizer_for(template_of(name), has_tokens)
    text = Text(tokenizer)
    assert text.markups.format() is FORMATS[name]
    calls = [("get_weather", {"city": "Zürich", "days": 3, "metric": True}), ("clock", {})]
    made = tuple(ToolCall(called, arguments, f"call0000{n}") for n, (called, arguments) in enumerate(calls))
    messages = (Message("user", "Ulm?"), Message("assistant", "", tool_calls=made))
    tokens, mask = encode_chat(messages, tokenizer, tools=tuple(TOOLS))
    prompt = text.chat([{"role": "user", "content": "Ulm?"}], TOOLS)
    assert tuple(tokens[: len(prompt)]) == prompt and mask == [n >= len(prompt) for n in range(len(tokens))]
    answer = tokens[len(prompt) :]
    assert answer[-1] == tokenizer.eos_token_id
    tools = [Tool(tool["function"]["name"], tool["function"]["parameters"]) for tool in TOOLS]
    markup, model = text.markups.of(prompt, tools), Untrained(tokenizer)
    for forced in (True, False):
        grammar = answer_grammar(AnswerParts(markup.format, tools, forced), text.markups.lark())
        assert model.accepts(grammar, answer[:-1]) == (len(answer) - 1, True)
    stream, reader = text.stream(kept=markup.kept), markup.reader()
    deltas = [delta for token in answer[:-1] for delta in reader.push(stream.push(token))]
    said, _, found = joined([*deltas, *reader.push(stream.finish(), is_last=True)])
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls and not said.strip()


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_an_untrained_model_makes_valid_calls(name: str, has_tokens: bool) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw, text = random.Random(seed), Text(tokenizer_for(template_of(name), has_tokens))
    model = Untrained(text.tokenizer)
    weather = Tool("get_weather", PARAMETERS)
    for parallel in (False, True):
        wanted = AnswerParts(
            FORMATS[name], [weather, Tool("clock", CLOCK["function"]["parameters"])], True, parallel
        )
        grammar = answer_grammar(wanted, text.markups.lark())
        for _ in range(4):
            markup = text.markups.of((), wanted.tools)
            stream, reader, deltas = text.stream(kept=markup.kept), markup.reader(), list[Any]()
            answer = model.answer(grammar, draw, 4000)
            assert answer[-1] == text.tokenizer.eos_token_id
            for token in answer[:-1]:
                deltas += reader.push(stream.push(token))
            said, _, calls = joined([*deltas, *reader.push(stream.finish(), is_last=True)])
            assert calls and (parallel or len(calls) == 1) and not said
            for call in calls:
                values = json.loads(call.arguments)
                if call.name == "get_weather":
                    jsonschema_rs.validate(PARAMETERS, values)
                else:
                    assert call.name == "clock" and values == {}


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_free_text_remains_possible_and_holds_no_broken_call(name: str, has_tokens: bool) -> None:
    text = Text(tokenizer_for(template_of(name), has_tokens))
    model, format = Untrained(text.tokenizer), FORMATS[name]
    grammar = answer_grammar(AnswerParts(format, [Tool("clock")]), text.markups.lark())

    def accepts(answer: str) -> tuple[int, bool]:
        ids = text.tokenizer(answer, add_special_tokens=False)["input_ids"]
        count, ends = model.accepts(grammar, ids)
        return len(ids) - count, ends

    for answer in ("", "Hello, world! Ünïcödé ✓", "1 < 2 [TOOL and {x} \n\n", "<b>{</b>"):
        assert accepts(answer) == (0, True)
    call = written(format, [("clock", {})])
    assert accepts(call) == (0, True)
    assert accepts(f"So:\n{call}")[0] == 0 or not format.syntax.anywhere
    for broken in (call.replace("clock", "unknown"), call.replace("{}", "[]").replace("clock", "clocks")):
        assert accepts(broken)[0] > 0
    if format.syntax.closing or format.syntax.after:
        assert accepts(call[:-1])[1] is False


def test_what_no_format_reads_is_refused() -> None:
    tokenizer = tokenizer_for(template_of("json").replace('{"name"', '{"tool"'))
    with pytest.raises(DataError, match=r"in none of the formats hermes, .* --tool-format"):
        Markups(tokenizer).format()
    assert Markups(tokenizer, "hermes").format() is FORMATS["hermes"]
    with pytest.raises(ConfigError, match="no tool format is called 'xml'; there are hermes"):
        named_format("xml")
    silent = template_of("json").replace("{% if m.tool_calls %}", "{% if false %}")
    assert Markups(tokenizer_for(silent)).format() is FORMATS["json"]  # told in words


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2"])
def test_schemas_that_tags_cannot_hold_are_refused_where_they_are_strict(name: str) -> None:
    lark = Text(tokenizer_for(template_of(name))).markups.lark
    bounded = {"properties": {"a": {"type": "string", "maxLength": 3}}}
    assert answer_grammar(AnswerParts(FORMATS[name], [Tool("f", bounded)]), lark())
    with pytest.raises(DataError, match=r"tools\[0\], 'f': 'maxLength' of the string 'a' cannot be enforced"):
        answer_grammar(AnswerParts(FORMATS[name], [Tool("f", bounded, strict=True)]), lark())
    with pytest.raises(DataError, match="cannot be written"):
        answer_grammar(AnswerParts(FORMATS[name], [Tool("f", {"properties": {"a>": {}}})]), lark())
    with pytest.raises(DataError, match='"properties" to be an object'):
        answer_grammar(AnswerParts(FORMATS[name], [Tool("f", {"properties": []})]), lark())


def test_gemma_holds_nested_schemas_and_reads_what_breaks_them() -> None:
    parameters = {
        "properties": {
            "where": {
                "type": "object",
                "properties": {
                    "x": {"type": "number"},
                    "names": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["names"],
            },
            "else": {},
        },
        "required": ["where"],
    }
    text, tool = Text(tokenizer_for(template_of("gemma4"))), Tool("f", parameters)
    model, lark = Untrained(text.tokenizer), text.markups.lark
    grammar = answer_grammar(AnswerParts(FORMATS["gemma4"], [tool], True, False), lark())

    def of(arguments: str) -> tuple[bool, Any]:
        answer = f"<|tool_call>call:f{arguments}<tool_call|>"
        ids = text.tokenizer(answer, add_special_tokens=False)["input_ids"]
        reader = AnswerReader(Markup(format=FORMATS["gemma4"], tools={"f": tool}))
        _, _, calls = joined(reader.push(answer, is_last=True))
        return model.accepts(grammar, ids) == (len(ids), True), json.loads(calls[0].arguments)

    mark = '<|"|>'
    names = f"names:[{mark}a,}}{mark},{mark}{mark}]"
    assert of(f"{{where:{{{names},x:1.5}}}}") == (True, {"where": {"names": ["a,}", ""], "x": 1.5}})
    assert of(f"{{else:[null,{{k:{mark}v{mark}}}],where:{{{names}}}}}") == (
        True, {"else": [None, {"k": "v"}], "where": {"names": ["a,}", ""]}}
    )  # fmt: skip
    assert of("{else:1}") == (False, {"else": 1})
    assert of(f"{{where:{{x:{mark}a{mark},{names}}}}}")[0] is False
    assert of("{else:Ulm,where}") == (False, {"else": "Ulm", "where": None})
    with pytest.raises(DataError, match="'minItems' cannot be enforced"):
        bounded = {"properties": {"a": {"type": "array", "minItems": 2}}}
        answer_grammar(AnswerParts(FORMATS["gemma4"], [Tool("f", bounded, strict=True)]), lark())


def test_calls_that_a_template_names_by_their_ids() -> None:
    """Whatever ids a client sends: the names are in them, and numbers count through the chat."""
    tokenizer = tokenizer_for(template_of("kimi_k2"))
    calls = [ToolCall("clock", {}, id) for id in ("a", "call_9", "x")]
    chat = [
        Message("user", "when?"),
        Message("assistant", "", tool_calls=(calls[0], calls[1])),
        Message("tool", "now", tool_call_id="a"),
        Message("tool", "then", tool_call_id="call_9"),
        Message("assistant", "", tool_calls=(calls[2],)),
    ]
    text = tokenizer.decode(encode_chat(tuple(chat), tokenizer, tools=tuple(TOOLS))[0])
    assert [f"functions.clock:{number}<|" in text for number in range(4)] == [True, True, True, False]
    assert "call_9" not in text and Markups(tokenizer).format() is named_format("kimi_k2")
