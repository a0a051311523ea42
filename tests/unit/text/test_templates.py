"""Chats rendered in a sandbox: as transformers renders them, and ended where a template does not end."""

import random
import time
from typing import Any

import pytest
from tests.unit.text.test_chat_tools import MARKED, PLAIN, TOOL, tokenizer_with
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from coserve.errors import DataError
from coserve.jobs.messages import Message
from coserve.text import chat, rendering
from coserve.text.chat import encode_chat
from coserve.text.control import ControlTokens
from coserve.text.rendering import render_marked, render_request

# Each uses something that transformers gives to templates beside what Jinja has.
TEMPLATES = {
    "tools": PLAIN,
    "marks": MARKED,
    "date": "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}",
    "control flow": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% if m.role == 'tool' %}{% continue %}{% endif %}{{ loop.last }}{{ m.content | trim }}\n{% endfor %}",
    "variables": "{% set ns = namespace(seen=0, self='x') %}{% for m in messages %}"
    "{% set ns.seen = ns.seen + 1 %}{{ ns.seen }}{{ dict(a=ns.seen) | tojson(indent=2) }}"
    "{{ dict.fromkeys(['x'], 1) }}{% endfor %}{{ ns.self }}",
    "macros": "{% macro show(m) -%}\n  <{{ m.role }}>\n{%- endmacro %}\n   {% for m in messages %}\n"
    "   {{ show(m) }}{{ m['content'][:3] ~ '…' }}{{ m.content | length }}\n   {% endfor %}\n",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.role }}{% endfor %}",
    "undefined": "{{ messages[0].none }}{{ tools is defined }}{{ tools is none }}{{ documents }}"
    "{{ eos_token }}",
    "json": "{{ messages | tojson }}{{ messages[-1] | tojson(sort_keys=true, separators=(',', ':')) }}",
    "refuses": "{% if messages | length > 1 %}{{ raise_exception('one message <|at most|>') }}{% endif %}ok",
    "breaks": "{{ 1 / 0 }}",
    "wants more": "{{ messages[0].content.missing.deeper }}",
    "escapes": "{{ messages.__class__.__mro__ }}",
    "changes": "{{ messages.append(1) }}",
    "syntax": "{% for %}",
    "no end": "{% generation %}",
    "private": "{% set ns = namespace(_x=1) %}",
}
ROLES = ("system", "user", "assistant", "tool")
WORDS = ("Hi", " there\n", "", "<|user|>", "</s>", "é🚀", "{{ 1 }}", '"quoted"', "  ", "a" * 300)


def turns_of(draws: random.Random) -> list[dict[str, Any]]:
    made = []
    for _ in range(draws.randrange(1, 5)):
        turn: dict[str, Any] = {"role": draws.choice(ROLES), "content": draws.choice(WORDS)}
        if draws.random() < 0.2:
            turn[draws.choice(["reasoning_content", "thinking", "reasoning", "name"])] = draws.choice(
                [*WORDS, None]
            )
        made.append(turn)
    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_is_rendered_as_transformers_does(name: str) -> None:
    tokenizer, draws = tokenizer_with(TEMPLATES[name]), random.Random(name)
    for _ in range(20):
        turns = turns_of(draws)
        tools = [TOOL] if draws.random() < 0.3 and name == "tools" else []
        try:
            expected = tokenizer.apply_chat_template(
                turns, tools=tools or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            with pytest.raises(DataError, match="the chat template refuses this chat: ") as caught:
                render_request(tokenizer, turns, tools)
            if name not in ("no end", "private"):
                assert str(error) in str(caught.value)
            continue
        assert render_request(tokenizer, turns, tools) == expected
        if name == "marks":
            texts, spans = render_jinja_template(
                [turns], chat_template=TEMPLATES[name], return_assistant_tokens_mask=True
            )
            assert render_marked(tokenizer, turns) == (texts[0], spans[0])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 0.3 s"),
        ("{{ 'a' * 99999999 * 99999 }}", "more than"),
        ("{% macro a(n) %}{{ a(n + 1) }}{% endmacro %}{{ a(0) }}", "recursion"),
    ],
)
def test_a_template_that_does_not_end_is_ended(
    template: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 0.3)
    with pytest.raises(DataError, match="the chat template") as caught:
        render_request(tokenizer_with(template), [{"role": "user", "content": "Hi"}])
    assert said in str(caught.value)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be given this chat"):
        render_request(tokenizer_with(PLAIN), [{"role": "user", "content": "\ud800"}])
    with pytest.raises(DataError, match="cannot be given this chat"):
        render_request(tokenizer_with(PLAIN), [{"role": "user", "content": 10**40}])


SPELLED = PLAIN.replace("<|{{ m.role }}|>", "{{ m.role }}:").replace("<|assistant|>", "assistant:")


@pytest.mark.parametrize("template", [PLAIN, SPELLED, None])
def test_answers_are_found_as_by_reading_the_chat_up_to_each(
    template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anchors save reading the chat again from its beginning."""
    tokenizer, draws = _merging(template), random.Random(7)
    for _ in range(30):
        turns = [
            Message(draws.choice(["user", "assistant"]), draws.choice(WORDS) or "x", draws.randrange(2))
            if i
            else Message("assistant", "x")
            for i in range(draws.randrange(2, 9))
        ]
        messages = tuple(m if m.role == "assistant" else Message(m.role, m.content) for m in turns)
        messages = (Message("user", "Hi"), *messages)
        found = encode_chat(messages, tokenizer)
        with monkeypatch.context() as patch:
            patch.setattr(ControlTokens, "anchors", lambda self, text, ids: [])
            assert encode_chat(messages, tokenizer) == found


def _merging(template: str | None) -> PreTrainedTokenizerFast:
    from tests.unit.text.test_text import byte_level

    made = byte_level(template, bos=False)
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    return made


def test_a_long_chat_is_read_in_time_that_grows_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _merging(PLAIN)
    read: list[int] = []
    encode = chat.token_ids
    monkeypatch.setattr(chat, "token_ids", lambda given, text: read.append(len(text)) or encode(given, text))

    def characters(pairs: int) -> int:
        read.clear()
        turns = (Message("user", "Hi there"), Message("assistant", "Hello " * 20)) * pairs
        assert sum(encode_chat(turns, tokenizer)[1]) > 20 * pairs
        return sum(read)

    assert characters(200) < 2.2 * characters(100)
    monkeypatch.setattr(chat, "_MOST_AGAIN", 20_000)
    with pytest.raises(DataError, match="more answers than can be told apart"):
        encode_chat((Message("user", "a"), Message("assistant", "b")) * 200, _merging(None))


def test_the_time_of_a_chat_of_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of prefixes: the time grows with the square of the turns, and has an end."""
    turns = (Message("user", "Hi"), Message("assistant", "Hello")) * 20_000
    monkeypatch.setattr(rendering, "SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(
        DataError, match=r"cannot render this chat of 40000 messages: it takes more than 0\.5 s"
    ):
        encode_chat(turns, tokenizer_with(PLAIN))
    assert time.monotonic() - began < 30


def test_a_call_with_reasoning_and_content_is_shown_to_templates_that_refuse_both() -> None:
    """GPT-OSS' template refuses both, and tools without a description, too."""
    strict = (
        "{% for t in tools or [] %}// {{ t.function.description | length }}{{ '' + t.function.description }}"
        "{% endfor %}{% for m in messages %}{{ m.role }}:"
        "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "<{{ m.thinking or m.content }}>{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {}}}
    said = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    bare = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    asked = {"role": "user", "content": "When?"}
    for content in ("I look.", [{"type": "text", "text": "I look."}]):
        turns = [asked, {**said, "content": content, "reasoning_content": "Hm."}]
        text = render_request(tokenizer_with(strict), turns, [bare])
        assert text == "// 0user:When?assistant:<Hm.\nI look.>clock"
    assert render_request(tokenizer_with(strict), [asked, said]) == "user:When?assistant:<I look.>clock"
    both = strict.replace("raise_exception('both')", "m.content")
    turns = [asked, {**said, "reasoning_content": "Hm."}]
    assert render_request(tokenizer_with(both), turns) == "user:When?assistant:I look.<Hm.>clock"
