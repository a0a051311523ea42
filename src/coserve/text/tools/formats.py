"""All formats of calls, and the one that a chat template writes. Gemma's have a file of their own."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from coserve.errors import ConfigError, DataError
from coserve.text import told_tools
from coserve.text.deltas import joined
from coserve.text.tools.format import ToolFormat
from coserve.text.tools.gemma import FUNCTION_GEMMA, GEMMA4
from coserve.text.tools.harmony import HARMONY, ChannelReader
from coserve.text.tools.json_calls import JsonCalls
from coserve.text.tools.reader import CallReader
from coserve.text.tools.syntax import NAME, NUMBER, TOOL_NAME, Syntax
from coserve.text.tools.tool import Tool
from coserve.text.tools.xml_calls import ParameterSyntax, XmlCalls

# Hermes, Qwen 2.5 and Qwen 3: `<tool_call>` and JSON.
HERMES: Final = JsonCalls(
    "hermes",
    Syntax(
        before=f'<tool_call>\n{{"name": "{NAME}", "arguments": ',
        after="}\n</tool_call>",
        between="\n",
    ),
)

# Qwen3-Coder: `<function=name>` and its parameters, within `<tool_call>`.
QWEN3_CODER: Final = XmlCalls(
    "qwen3_coder",
    Syntax(before=f"<tool_call>\n<function={NAME}>", after="\n</tool_call>", between="\n"),
    ParameterSyntax(f"<parameter={NAME}>", "</parameter>", "</function>", has_lines=True),
)

# GLM 4.5 and 4.6: the name, and pairs of keys and values, within `<tool_call>`.
GLM: Final = XmlCalls(
    "glm45",
    Syntax(
        before=f"<tool_call>{NAME}",
        after="",
        between="\n",
        reads_before=rf"<tool_call>\s{{0,16}}(?P<name>{TOOL_NAME})\n",
    ),
    ParameterSyntax(
        f"<arg_key>{NAME}</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>", has_lines=False
    ),
)

# MiniMax M2: `<invoke name="...">` and its parameters, all calls within one `<minimax:tool_call>`.
MINIMAX: Final = XmlCalls(
    "minimax_m2",
    Syntax(
        opening="<minimax:tool_call>\n",
        before=f'<invoke name="{NAME}">',
        after="",
        between="\n",
        closing="\n</minimax:tool_call>",
    ),
    ParameterSyntax(f'<parameter name="{NAME}">', "</parameter>", "</invoke>", has_lines=False),
)

# Mistral: a list of JSON after `[TOOL_CALLS]`, or since 2025 each call after it with its name outside of
# the JSON. Templates take ids of nine letters and digits only, and write them into the list.
_ID: Final = r'(?:\s{0,16},\s{0,16}"id"\s{0,16}:\s{0,16}"[a-zA-Z0-9]{0,64}")?'
_ID_LENGTH: Final = 9

MISTRAL: Final = JsonCalls(
    "mistral",
    Syntax(
        opening="[TOOL_CALLS] [",
        before=f'{{"name": "{NAME}", "arguments": ',
        after="}",
        between=", ",
        closing="]",
        reads_after=rf"{_ID}\s{{0,16}}\}}",
    ),
    id_prefix="",
    id_length=_ID_LENGTH,
)
MISTRAL_NAMES: Final = JsonCalls(
    "mistral_names",
    Syntax(before=f"[TOOL_CALLS]{NAME}[ARGS]", after=""),
    id_prefix="",
    id_length=_ID_LENGTH,
)

# DeepSeek: each call between control tokens of its own. V3 and R1 write JSON in a block of code, V3.1 after
# the name.
_CALLS: Final = "<｜tool▁calls▁begin｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_END: Final = "<｜tool▁call▁end｜>"
_ALL_END: Final = "<｜tool▁calls▁end｜>"

DEEPSEEK_V3: Final = JsonCalls(
    "deepseek_v3",
    Syntax(
        opening=_CALLS,
        before=f"{_CALL}function{_SEPARATOR}{NAME}\n```json\n",
        after=f"\n```{_END}",
        between="\n",
        closing=_ALL_END,
    ),
)
DEEPSEEK_V31: Final = JsonCalls(
    "deepseek_v31",
    Syntax(opening=_CALLS, before=f"{_CALL}{NAME}{_SEPARATOR}", after=_END, closing=_ALL_END),
)

# Kimi K2: each call between control tokens, with a name that is numbered through the whole chat.
KIMI: Final = JsonCalls(
    "kimi_k2",
    Syntax(
        opening="<|tool_calls_section_begin|>",
        before=f"<|tool_call_begin|>functions.{NAME}:{NUMBER}<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
    ),
)

# Llama 3.1 to 3.3: an answer that is JSON is a call. `<|python_tag|>` before it is passed over; grammars do
# not write it.
LLAMA3: Final = JsonCalls(
    "llama3_json",
    Syntax(
        before=f'{{"name": "{NAME}", "parameters": ',
        after="}",
        between="; ",
        anywhere=False,
        skipped="<|python_tag|>",
    ),
)

# Templates without a format of their own: an answer that is JSON with a name and arguments is a call, as is
# each further line.
GENERIC: Final = JsonCalls(
    "json",
    Syntax(before=f'{{"name": "{NAME}", "arguments": ', after="}", between="\n", anywhere=False),
)

_ALL: Final[Sequence[ToolFormat]] = (
    HERMES, QWEN3_CODER, GLM, MINIMAX, MISTRAL, MISTRAL_NAMES, DEEPSEEK_V31, DEEPSEEK_V3,
    FUNCTION_GEMMA, GEMMA4, KIMI, HARMONY, LLAMA3, GENERIC,
)  # fmt: skip
FORMATS: Final[Mapping[str, ToolFormat]] = MappingProxyType({one.name: one for one in _ALL})


def named_format(name: str) -> ToolFormat:
    """The format of a setting. Raises ConfigError."""
    if name not in FORMATS:
        raise ConfigError(f"no tool format is called {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def written_format(answered: str, asked: str) -> ToolFormat:
    """The format that a template writes calls in, which has rendered `CALLED` as `answered`, and the first of
    them with the generation prompt as `asked`. Raises DataError where no format reads the call."""
    is_longer = answered.startswith(asked)
    answer = answered[len(asked) :] if is_longer else answered.rpartition(told_tools.QUESTION)[2]
    tools = {told_tools.NAME: Tool(told_tools.NAME, told_tools.PARAMETERS)}
    for format in _ALL:
        reader = ChannelReader("", tools) if format is HARMONY else CallReader(format, tools)
        _, _, calls = joined([*reader.push(answer), *reader.finish()])
        if [(call.name, _value(call.arguments)) for call in calls] == [
            (told_tools.NAME, told_tools.ARGUMENTS)
        ]:
            return format
    raise DataError(
        f"the chat template writes calls of tools in none of the formats {', '.join(FORMATS)}; name the "
        "one that the model writes with --tool-format"
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
