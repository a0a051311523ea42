"""Bodies of `/v1/chat/completions` as chats."""

from coserve.errors import DataError
from coserve.jobs.messages import Message, made_call
from coserve.serve.answering.chat import Chat
from coserve.serve.answering.structure import Structure
from coserve.serve.errors import ApiError
from coserve.serve.schema.chat import ChatMessage, ChatRequest, JsonObjectFormat, JsonSchemaFormat
from coserve.serve.schema.common import JsonObject
from coserve.serve.schema.tools import AllowedToolChoice, NamedTool
from coserve.text.chat import turn_of
from coserve.text.markup import Markups


def chat_of(body: ChatRequest, markups: Markups) -> Chat:
    """The chat of a body. Raises ApiError for what the model or its template cannot do."""
    structure = _structure(body)
    tools = [] if body.tool_choice == "none" else body.tools or []
    if structure is not None or tools:
        for param in ("min_tokens", "ignore_eos"):
            if getattr(body, param):
                message = (
                    f"'{param}' is not allowed with response_format or tools, which say where an answer ends."
                )
                raise ApiError(400, message, param=param, code="invalid_value")
    chosen = body.chosen
    choice = body.tool_choice
    return Chat(
        turns=[_turn(index, message) for index, message in enumerate(body.messages)],
        tools=[tool.shown for tool in tools],
        callable=[tool.tool for tool in tools if not chosen or tool.function.name in chosen],
        forced=choice == "required"
        or isinstance(choice, NamedTool)
        or (isinstance(choice, AllowedToolChoice) and choice.allowed_tools.mode == "required"),
        parallel=body.parallel_tool_calls is not False,
        structure=structure,
        variables=_variables(body, markups),
        is_continued=bool(body.continue_final_message),
    )


def _turn(index: int, message: ChatMessage) -> JsonObject:
    try:
        calls = tuple(
            made_call(call.function.model_dump(), f"tool_calls[{number}].function", call.id)
            for number, call in enumerate(message.tool_calls or ())
        )
    except DataError as error:
        raise ApiError(400, str(error), param=f"messages.{index}.tool_calls", code="invalid_value") from error
    turn = Message(
        message.role,
        message.text,
        tool_calls=calls,
        name=message.name,
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning_content,
    )
    return turn_of(turn)


def _variables(body: ChatRequest, markups: Markups) -> JsonObject:
    """Variables of the chat template. Raises ApiError for an effort that it does not read."""
    variables = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is None:
        return variables
    if markups.reads("reasoning_effort"):
        return {"reasoning_effort": effort, **variables}
    if effort != "none":
        message = "Unsupported parameter: 'reasoning_effort' is not supported by this model's chat template."
        raise ApiError(400, message, param="reasoning_effort", code="unsupported_parameter")
    return variables


def _structure(body: ChatRequest) -> Structure | None:
    """The form of answers. Raises ApiError for one beside a response_format."""
    asked = body.structure
    match body.response_format:
        case JsonObjectFormat():
            format = Structure("json", {"type": "object"})
        case JsonSchemaFormat(json_schema=schema):
            format = Structure("json", {} if schema.schema_ is None else schema.schema_)
        case _:
            return asked
    if asked is not None:
        message = f"'{asked.param}' and response_format exclude each other."
        raise ApiError(400, message, param=asked.param, code="invalid_value")
    return format
