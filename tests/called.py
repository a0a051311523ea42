"""Chats with tools: a template for each format of calls, a tokenizer of bytes with its control tokens, and an
untrained model that draws any token which a grammar allows."""

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coserve.text.tools.format import ToolFormat
from coserve.text.tools.formats import FORMATS
from coserve.text.tools.gemma import GemmaCalls
from coserve.text.tools.syntax import NAME, NUMBER
from coserve.text.tools.xml_calls import XmlCalls

Calls = Sequence[tuple[str, Mapping[str, Any]]]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Ulm", 'Bad "X" </b>', "Zürich"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "metric": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells the weather.", "parameters": PARAMETERS},
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
}
TOOLS = [WEATHER, CLOCK]

_NAME, _VALUES = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
_EACH = "{% for c in m.tool_calls %}"
_LINE = "{% if not loop.first %}{{ '\n' }}{% endif %}"
_FUNCTION = f'{{"name": "{_NAME}", "arguments": {_VALUES}'
# What a template writes for `m.tool_calls`, as the models' own do.
_CALLS: Mapping[str, str] = {
    "hermes": _EACH + _LINE + "<tool_call>\n" + _FUNCTION + "}\n</tool_call>{% endfor %}",
    "qwen3_coder": _EACH + _LINE + "<tool_call>\n<function=" + _NAME + ">"
    "{% for k, v in c.function.arguments | items %}{{ '\n' }}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>{% endfor %}{{ '\n' }}</function>\n"
    "</tool_call>{% endfor %}",
    "glm45": _EACH + _LINE + "<tool_call>" + _NAME
    + "{% for k, v in c.function.arguments | items %}{{ '\n' }}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}{{ '\n' }}"
    "</tool_call>{% endfor %}",
    "minimax_m2": "<minimax:tool_call>" + _EACH + '{{ "\n" }}<invoke name="' + _NAME + '">'
    "{% for k, v in c.function.arguments | items %}{{ '\n' }}<parameter name=\"{{ k }}\">"
    "{{ v if v is string else v | tojson }}</parameter>{% endfor %}{{ '\n' }}</invoke>{% endfor %}"
    "{{ '\n' }}</minimax:tool_call>",
    "mistral": "[TOOL_CALLS] [" + _EACH + "{% if not loop.first %}, {% endif %}" + _FUNCTION
    + "}{% endfor %}]",
    "mistral_names": _EACH + "[TOOL_CALLS]" + _NAME + "[ARGS]" + _VALUES + "{% endfor %}",
    "deepseek_v31": "<｜tool▁calls▁begin｜>" + _EACH + "<｜tool▁call▁begin｜>" + _NAME + "<｜tool▁sep｜>"
    + _VALUES + "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>" + _EACH + _LINE +
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + _NAME + "\n```json\n" + _VALUES
    + "\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|>" + _EACH + "<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>" + _VALUES + "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "llama3_json": _EACH + '{% if not loop.first %}; {% endif %}{"name": "' + _NAME + '", "parameters": '
    + _VALUES + "}{% endfor %}",
    "json": _EACH + _LINE + _FUNCTION + "}{% endfor %}",
}  # fmt: skip
_GEMMA = (
    "{% macro val(v) %}{% if v is string %}MARK{{ v }}MARK{% elif v is mapping %}"
    "{ {%- for k, o in v | dictsort %}"
    "{{ k }}:{{ val(o) }}{% if not loop.last %},{% endif %}{% endfor -%} }{% elif v is sequence %}["
    "{% for o in v %}{{ val(o) }}{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v | tojson }}"
    "{% endif %}{% endmacro %}"
)
_CALLS = {
    **_CALLS,
    **{
        name: _GEMMA.replace("MARK", mark)
        + _EACH + opening + "call:" + _NAME + "{{ val(c.function.arguments) }}" + closing + "{% endfor %}"
        for name, opening, closing, mark in (
            ("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
            ("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
        )
    },
}  # fmt: skip
# Messages in channels, as GPT-OSS' template has them: reasoning is before calls and the last answer alone.
_CHANNELS = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% set last = namespace(name='') %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% if m.thinking and (m.tool_calls or (loop.last and not add_generation_prompt)) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0] %}{% set last.name = c.function.name %}"
    "<|start|>assistant to=functions."
    + _NAME
    + "<|channel|>commentary json<|message|>"
    + _VALUES
    + "<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant"
    "<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_SPECIAL = (
    "<|end|>",
    "<|user|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
)  # skipped in texts, as models' own
_ADDED = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<minimax:tool_call>",
    "</minimax:tool_call>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
)  # fmt: skip


def template_of(name: str, thinks: bool = False) -> str:
    """A chat template that writes calls in the format of this name; one of a model that `thinks` has
    reasoning, which it opens unless `enable_thinking` is false."""
    if name == "harmony":
        return _CHANNELS
    thought = (
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        if thinks
        else ""
    )
    asks = "{% if enable_thinking is not false %}<think>\n{% endif %}" if thinks else ""
    return (
        "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|{{ m.role }}|>" + thought
        + "{{ m.content }}{% if m.tool_calls %}" + _CALLS[name] + "{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>" + asks + "{% endif %}"
    )  # fmt: skip


@cache
def tokenizer_for(template: str, has_tokens: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes; the marks of all formats are tokens of their own where it `has_tokens`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_alone.decoder = decoders.ByteLevel()
    eos = "<|return|>" if template == _CHANNELS else "<|end|>"
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token=eos)
    special = _SPECIAL if has_tokens else _SPECIAL[:2]
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    if has_tokens:
        made.add_tokens([AddedToken(name, special=False, normalized=False) for name in _ADDED])
    made.chat_template = template
    return made


def written(format: ToolFormat, calls: Calls) -> str:
    """Calls as the format writes them."""
    syntax, found = format.syntax, ""
    for index, (name, arguments) in enumerate(calls):
        found += (syntax.between if index else syntax.opening) + syntax.before.replace(NAME, name)
        found = found.replace(NUMBER, str(index))
        if isinstance(format, XmlCalls):
            around = format.parameters
            line = "\n" * around.has_lines
            for key, value in arguments.items():
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                found += f"\n{around.before.replace(NAME, key)}{line}{text}{line}{around.after}"
            found += f"\n{around.ending}"
        elif isinstance(format, GemmaCalls):
            found += _in_gemma(arguments, format.mark).removeprefix("{")
        else:
            found += json.dumps(arguments, ensure_ascii=False)
        found += syntax.after
    return found + syntax.closing


def _in_gemma(value: Any, mark: str) -> str:
    match value:
        case str():
            return f"{mark}{value}{mark}"
        case Mapping():
            return "{" + ",".join(f"{key}:{_in_gemma(own, mark)}" for key, own in value.items()) + "}"
        case list():
            return "[" + ",".join(_in_gemma(own, mark) for own in value) + "]"
    return json.dumps(value)


class Untrained:
    """A model that draws each token of an answer from all that a grammar allows, without any preference."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocabulary: int | None = None) -> None:
        self._eos = tokenizer.eos_token_id
        self._view = from_tokenizer(tokenizer, n_vocab=vocabulary or len(tokenizer), eos_token=[self._eos])

    def matcher(self, grammar: str) -> Any:
        """A matcher of a grammar."""
        made = LLMatcher(self._view, grammar, log_level=0)
        assert not made.is_error(), made.get_error()
        return made

    def accepts(self, grammar: str, tokens: Sequence[int]) -> tuple[int, bool]:
        """(the number of tokens that the grammar allows, whether an answer may end there)."""
        matcher = self.matcher(grammar)
        count = matcher.validate_tokens(list(tokens))
        matcher.consume_tokens(list(tokens[:count]))
        return count, matcher.is_accepting()

    def answer(self, grammar: str, draw: random.Random, most: int = 600) -> list[int]:
        """Tokens of an answer, with its end unless it is longer than `most`."""
        matcher, found = self.matcher(grammar), list[int]()
        while len(found) < most:
            allowed = (
                []
                if matcher.is_stopped()
                else [i for i, bias in enumerate(matcher.compute_logit_bias()) if bias]
            )
            token = draw.choice(allowed) if allowed and not matcher.is_stopped() else self._eos
            found.append(token)
            if token == self._eos:
                break
            matcher.consume_token(token)
        return found


ALL = tuple(name for name in FORMATS if name != "harmony")  # whose messages are in channels
