"""Bodies as chats and sampling parameters."""

from collections.abc import Callable, Iterator
from typing import Final

from coserve.core.request import SamplingParams
from coserve.errors import DataError
from coserve.jobs.messages import Message, made_call
from coserve.serve.answering.chat import Chat
from coserve.serve.answering.structure import Structure
from coserve.serve.anthropic.hosted import refuse_hosted
from coserve.serve.anthropic.schema import (
    MessageParam,
    MessagePrompt,
    MessagesRequest,
    TextBlockParam,
    TextContent,
    ThinkingBlockParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
    kind_of,
)
from coserve.serve.errors import ApiError
from coserve.serve.schema.common import JsonObject
from coserve.text.chat import turn_of
from coserve.text.generation import OURS
from coserve.text.tools.tool import Tool

_BETWEEN: Final = "\n"  # blocks of a turn, and messages that are one turn
_HIGHEST: Final = frozenset({"xhigh", "max"})  # efforts that templates do not know


def chat_of(body: MessagePrompt, reads: Callable[[str], bool], ignores_hosted: bool = False) -> Chat:
    """The chat of a body; `reads` tells whether the chat template reads a variable. One that ends with the
    assistant's turn is continued. Raises ApiError 400, for what does not run here unless that is ignored."""
    if not ignores_hosted:
        refuse_hosted(body)
    choice = body.tool_choice
    kind, name = ("auto", None) if choice is None else (choice.type, choice.name)
    tools = [] if kind == "none" else body.own_tools
    turns = _turns(body)
    return Chat(
        turns=[turn_of(turn) for turn in turns],
        tools=[_shown(tool) for tool in tools],
        callable=[
            Tool(tool.name, tool.input_schema, bool(tool.strict))
            for tool in tools
            if name in (None, tool.name)
        ],
        forced=kind in ("any", "tool"),
        parallel=choice is None or not choice.disable_parallel_tool_use,
        structure=_structure(body),
        variables=_variables(body, reads),
        is_continued=turns[-1].role == "assistant",
    )


def _structure(body: MessagePrompt) -> Structure | None:
    form = None if body.output_config is None else body.output_config.format
    return None if form is None else Structure("json", form.schema_, "output_config.format")


def _variables(body: MessagePrompt, reads: Callable[[str], bool]) -> JsonObject:
    """Variables of the chat template, of those that it reads. Clients send the same effort to every model."""
    found: JsonObject = {}
    if body.thinking is not None and reads("enable_thinking"):
        found["enable_thinking"] = body.thinking.type != "disabled"
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None and reads("reasoning_effort"):
        found["reasoning_effort"] = "high" if effort in _HIGHEST else effort
    return found


def _shown(tool: ToolParam) -> JsonObject:
    """A tool as templates show it."""
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _turns(body: MessagePrompt) -> list[Message]:
    """The turns of a chat: neighbours of one role are one, but for results of calls."""
    found = list[Message]()
    for turn in _messages(body):
        if found and found[-1].role == turn.role != "tool":
            found[-1] = _joined(found[-1], turn)
        else:
            found.append(turn)
    if not found:
        message = "The messages hold nothing to answer: what is in them does not run here."
        raise ApiError(400, message, param="messages", code="invalid_value")
    if found[-1].role == "assistant" and found[-1].tool_calls:
        message = "The last message calls tools: their results have to follow."
        raise ApiError(400, message, param="messages", code="invalid_value")
    return found


def _messages(body: MessagePrompt) -> Iterator[Message]:
    if body.system is not None:
        yield Message("system", _text(body.system))
    for index, message in enumerate(body.messages):
        if isinstance(message.content, str):
            yield Message(message.role, message.content)
        else:
            yield from _parts(index, message)


def _parts(index: int, message: MessageParam) -> Iterator[Message]:
    """The turns of a message with blocks."""
    texts, thoughts, calls = list[str](), list[str](), list[ToolUseBlockParam]()
    for block in message.content:
        match block:
            case TextBlockParam():
                texts.append(block.text)
            case ThinkingBlockParam() if message.role == "assistant":
                thoughts.append(block.thinking)
            case ToolUseBlockParam() if message.role == "assistant":
                calls.append(block)
            case ToolResultBlockParam() if message.role == "user":
                yield Message("tool", _text(block.content or ""), tool_call_id=block.tool_use_id)
            case dict():  # hosted, and ignored
                pass
            case _:
                told = f"A block of type '{kind_of(block)}' is not allowed at the role '{message.role}'."
                raise ApiError(400, told, param=f"messages.{index}.content", code="invalid_value")
    if not (texts or thoughts or calls) and message.content:
        return  # results alone
    try:
        made = tuple(
            made_call({"name": call.name, "arguments": call.input}, f"messages.{index}.content", call.id)
            for call in calls
        )
    except DataError as error:
        raise ApiError(400, str(error), param=f"messages.{index}.content", code="invalid_value") from error
    thought = _BETWEEN.join(thoughts) if thoughts else None
    yield Message(message.role, _BETWEEN.join(texts), tool_calls=made, reasoning=thought)


def _joined(first: Message, second: Message) -> Message:
    thoughts = [thought for thought in (first.reasoning, second.reasoning) if thought is not None]
    return Message(
        first.role,
        _BETWEEN.join([first.content, second.content]),
        tool_calls=first.tool_calls + second.tool_calls,
        reasoning=_BETWEEN.join(thoughts) if thoughts else None,
    )


def _text(content: TextContent) -> str:
    return content if isinstance(content, str) else _BETWEEN.join(block.text for block in content)


def sampling_of(body: MessagesRequest, defaults: SamplingParams = OURS) -> SamplingParams:
    """Sampling parameters of a body, but for `max_tokens`; `defaults` are those of what it leaves out."""
    return SamplingParams(
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_k=defaults.top_k if body.top_k is None else body.top_k,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
        stop=tuple(body.stop_sequences or ()),
    )
