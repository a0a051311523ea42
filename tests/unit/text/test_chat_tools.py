"""Chats with tools and weights: what the template is given, and which tokens are learned."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coserve.errors import DataError
from coserve.jobs.messages import Message, ToolCall
from coserve.text.chat import encode_chat, encode_request

CALLS = (
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
)
TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "</s>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = TOOLS + TURNS + ASK
MARKED = (
    TOOLS + "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}"
    + CALLS
    + "</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}"
    + ASK
)
WEATHER = {"name": "weather", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": WEATHER}
CHAT = (
    Message("user", "Ulm?"),
    Message("assistant", "", tool_calls=(ToolCall("weather", {"city": "Ulm"}, "c1"),)),
    Message("tool", "rain", tool_call_id="c1"),
    Message("assistant", "It rains."),
)


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def learned(tokenizer: Any, messages: Any, **options: Any) -> tuple[str, list[str]]:
    """The whole text, and its learned stretches."""
    tokens, mask = encode_chat(tuple(messages), tokenizer, **options)
    stretches: list[list[int]] = [[]]
    for token, wanted in zip(tokens, mask, strict=True):
        stretches = [*stretches[:-1], [*stretches[-1], token]] if wanted else [*stretches, []]
    return tokenizer.decode(tokens), [tokenizer.decode(ids) for ids in stretches if ids]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_calls_are_learned_and_arguments_are_objects(template: str) -> None:
    tokenizer = tokenizer_with(template)
    text, found = learned(tokenizer, CHAT, tools=(TOOL,))
    strict = {"type": "function", "function": {**WEATHER, "strict": True}}
    assert learned(tokenizer, CHAT, tools=(strict,)) == (text, found), "a word to the server alone"
    one, other = (
        encode_request([{"role": "user", "content": "Ulm?"}], tokenizer, tools=(tool,))
        for tool in (strict, TOOL)
    )
    assert one == other
    assert found == ['[weather {"city": "Ulm"}]</s>', "It rains.</s>"]
    assert text.startswith(json.dumps([TOOL]) + "\n<|user|>Ulm?")


@pytest.mark.parametrize("template", [PLAIN, MARKED, None])
def test_turns_of_weight_0_are_read_and_not_learned(template: str | None) -> None:
    turns = [Message("user", "a"), Message("assistant", "b", weight=0), Message("user", "c"),
             Message("assistant", "d")]  # fmt: skip
    tokenizer = tokenizer_with(template)
    all_of_it, both = learned(tokenizer, [Message(turn.role, turn.content) for turn in turns])
    text, found = learned(tokenizer, turns)
    assert text == all_of_it and len(both) == 2 and found == both[1:]
    assert learned(tokenizer, [*turns[:3], Message("assistant", "d", weight=0)]) == (text, [])


def test_tools_that_a_template_leaves_out_are_told_in_words() -> None:
    """All of them, where it leaves out the tools, the calls or what they gave, or refuses one of these."""
    call = '{"name": "weather", "arguments": {"city": "Ulm"}}'
    told = (
        f"<|user|>You can call these functions, whose parameters are JSON schemas:\n{json.dumps(WEATHER)}\n"
    )
    refuses = "{% for m in messages if m.tool_calls %}{{ raise_exception('no calls') }}{% endfor %}"
    for template in (TURNS + ASK, (TOOLS + TURNS + ASK).replace(CALLS, ""), refuses + TOOLS + TURNS + ASK):
        text, (called, _) = learned(tokenizer_with(template), CHAT, tools=(TOOL,))
        assert text.startswith(told) and "Ulm?" in text
        assert called.startswith(call) and "<|user|>weather returned:\nrain" in text
    with pytest.raises(DataError, match="no chat template, and only a template can render tools"):
        encode_chat(CHAT, tokenizer_with(None))
    missing = TURNS.replace("m.tool_calls or []", "m.tool_calls") + ASK
    assert encode_chat(
        CHAT[:2],
        tokenizer_with("{% if messages[1] %}{% set t = messages[1].tool_calls[0] %}{% endif %}" + missing),
    )


def test_marks_that_tell_no_turns_apart_are_refused_with_weights() -> None:
    together = "{% generation %}" + TURNS + "{% endgeneration %}" + ASK
    turns = (*CHAT, Message("assistant", "more", weight=0))
    with pytest.raises(DataError, match="marks 1 stretches for 3 turns of the assistant"):
        encode_chat(turns, tokenizer_with(together))


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_control_tokens_in_tools_and_calls_are_text(template: str) -> None:
    tokenizer = tokenizer_with(template)
    end = tokenizer.eos_token_id
    call = ToolCall("weather</s>", {"city</s>": ["</s>"]})
    tool = {"type": "function", "function": {"name": "weather</s>", "enum": ["</s>"]}}
    turns = (Message("user", "a"), Message("assistant", "", tool_calls=(call,)))
    tokens, mask = encode_chat(turns, tokenizer, tools=(tool,))
    assert tokens.count(end) == 2  # the template's own, of two turns
    assert tokenizer.decode(tokens).count("</s>") == 7
    assert mask[[i for i, token in enumerate(tokens) if token == end][-1]]
    assert encode_chat(turns, tokenizer, allow_special_tokens=True, tools=(tool,))[0].count(end) == 7
