"""All formats, and the one that a chat template writes."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from coserve.errors import ConfigError, DataError
from coserve.text.deltas import joined
from coserve.text.told_tools import ARGUMENTS, NAME, PARAMETERS, QUESTION
from coserve.text.tools.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from coserve.text.tools.format import ToolFormat
from coserve.text.tools.gemma import FUNCTION_GEMMA, GEMMA4
from coserve.text.tools.generic import GENERIC
from coserve.text.tools.glm import GLM
from coserve.text.tools.hermes import HERMES
from coserve.text.tools.kimi import KIMI
from coserve.text.tools.llama3 import LLAMA3
from coserve.text.tools.minimax import MINIMAX
from coserve.text.tools.mistral import MISTRAL, MISTRAL_NAMES
from coserve.text.tools.qwen3_coder import QWEN3_CODER
from coserve.text.tools.reader import CallReader
from coserve.text.tools.tool import Tool

_ALL: Final[Sequence[ToolFormat]] = (
    HERMES, QWEN3_CODER, GLM, MINIMAX, MISTRAL, MISTRAL_NAMES, DEEPSEEK_V31, DEEPSEEK_V3,
    FUNCTION_GEMMA, GEMMA4, KIMI, LLAMA3, GENERIC,
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
    answer = answered[len(asked) :] if is_longer else answered.rpartition(QUESTION)[2]
    tools = {NAME: Tool(NAME, PARAMETERS)}
    for format in _ALL:
        reader = CallReader(format, tools)
        _, _, calls = joined([*reader.push(answer), *reader.finish()])
        if [(call.name, _value(call.arguments)) for call in calls] == [(NAME, ARGUMENTS)]:
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
