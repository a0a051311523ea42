"""`/v1/chat/completions`."""

from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from coserve.serve.answering.cost import (
    MOST_CALLS,
    MOST_GRAMMAR_BYTES,
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    MOST_VARIABLES,
)
from coserve.serve.schema.common import (
    CHAIN,
    MOST_TOKEN_ID,
    Alternatives,
    FinishName,
    Ignored,
    ListPage,
    Metadata,
    MostBytes,
    RequestBody,
    Schema,
    StructuredGeneration,
    Tier,
    Usage,
    Words,
    at_most,
)
from coserve.serve.schema.tools import (
    AllowedToolChoice,
    CallId,
    FunctionTool,
    NamedTool,
    ToolCallMade,
    ToolCallParam,
    ToolChoice,
)
from coserve.serve.schema.unsupported import (
    refuse_part,
    without_unsupported_chat,
    without_unsupported_message,
)

_OWN_VARIABLES: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def _without_own(variables: dict[str, Any]) -> dict[str, Any]:
    if taken := _OWN_VARIABLES & variables.keys():
        raise ValueError(f"{min(taken)!r} is a field of the request, or is no variable of templates here")
    return variables


ChatFinishName = FinishName | Literal["tool_calls"]
TemplateVariables = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")], Any],
    Field(max_length=MOST_VARIABLES),
    MostBytes(MOST_GRAMMAR_BYTES),
    BeforeValidator(at_most(MOST_VARIABLES)),
    AfterValidator(_without_own),
]
_HELLO: Any = {"model": "coserve-tiny", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}


class TextPart(RequestBody):
    """A piece of a message's text."""

    type: Literal["text"]
    text: Words

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
            refuse_part(kind)
        return part


class ChatMessage(RequestBody):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCallParam], Field(fail_fast=True, max_length=MOST_CALLS)] | None = None
    content: Words | Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_PARTS)] | None = Field(
        None, validate_default=True, description="Only left out beside tool_calls."
    )
    name: str | None = Field(None, max_length=256, description="Passed to the chat template.")
    tool_call_id: CallId | None = Field(
        None, description="The call that a message of the role `tool` answers."
    )
    reasoning_content: Words | None = Field(None, description="The reasoning before an earlier answer.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, message: Any) -> Any:
        return without_unsupported_message(message)

    @field_validator("content")
    @classmethod
    def _may_be_left_out(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "content is only left out beside tool_calls")
        return content

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> "ChatMessage":
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise ValueError(f"{name} is only allowed at the role assistant")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id is needed at the role tool, and only allowed there")
        return self

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class JsonSchema(RequestBody):
    """A schema that the answer must match."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")
    description: str | None = Field(None, max_length=4096)
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Answers always match; there is no lax way.")


class TextFormat(RequestBody):
    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    type: Literal["json_object"]


class JsonSchemaFormat(RequestBody):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(StructuredGeneration):
    """A chat to be continued."""

    model_config = ConfigDict(json_schema_extra={"examples": [_HELLO]})

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: int | None = Field(
        None, ge=1, le=MOST_TOKEN_ID, description="Most tokens of the answer; the room there is."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MOST_TOKEN_ID, description="The newer name of max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    response_format: ResponseFormat | None = None
    metadata: Metadata | None = Field(None, description="Kept with a completion that is stored.")
    store: bool | None = Field(None, description="Whether the completion is kept; false.")
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = Field(
        None, description="Tools that the answer may call, where the model's chat template writes calls."
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="Whether an answer calls a tool (`auto` unless given), has to, or which one it has to.",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may have several calls; true."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Passed to chat templates that read it; others take `none` only."
    )
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description="Further variables of the chat template, such as `enable_thinking` (vLLM's name)."
    )
    add_generation_prompt: bool | None = Field(
        None, description="True unless continue_final_message; there is nothing else (vLLM's name)."
    )
    continue_final_message: bool | None = Field(
        None, description="Whether the answer goes on with the last message, the assistant's (vLLM's name)."
    )
    prediction: Ignored | None = Field(None, description="Accepted, not used: it changes no answer.")
    prompt_cache_key: str | None = Field(None, max_length=1024, description="Accepted, not used.")
    prompt_cache_retention: str | None = Field(None, max_length=64, description="Accepted, not used.")
    prompt_cache_options: Ignored | None = Field(None, description="Accepted, not used.")
    safety_identifier: str | None = Field(None, max_length=1024, description="Accepted, not used.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        return without_unsupported_chat(body)

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

    @model_validator(mode="after")
    def _choice_needs_its_tools(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools have a name twice")
        if self.tool_choice in (None, "none", "auto"):
            return self
        if not names:
            raise ValueError("tool_choice is only allowed with tools")
        if unknown := self.chosen - set(names):
            raise ValueError(f"tool_choice names {min(unknown)!r}, which is none of the tools")
        return self

    @model_validator(mode="after")
    def _the_last_message_is_continued_or_not(self) -> "ChatRequest":
        if self.add_generation_prompt is not None and self.add_generation_prompt == bool(
            self.continue_final_message
        ):
            raise ValueError("exactly one of add_generation_prompt and continue_final_message may be true")
        last = self.messages[-1]
        if self.continue_final_message and (last.role != "assistant" or last.tool_calls):
            raise ValueError(
                "continue_final_message needs a last message of the role assistant, without calls"
            )
        return self

    @property
    def chosen(self) -> set[str]:
        """Names of the tools that `tool_choice` names."""
        match self.tool_choice:
            case NamedTool(function=function):
                return {function.name}
            case AllowedToolChoice(allowed_tools=allowed):
                return {tool.function.name for tool in allowed.tools}
        return set()


class Alternative(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Alternative):
    """A token of the answer, with the likeliest ones in its place."""

    top_logprobs: list[Alternative]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(None, description="Where the model's answers have it.")
    tool_calls: list[ToolCallMade] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishName
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    chain: str | None = Field(None, description=CHAIN)


class ChatCompletion(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Tier
    system_fingerprint: str
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    prompt_logprobs: list[Any] | None = Field(None, description="Where they are asked for.")


class CompletionUpdate(RequestBody):
    metadata: Metadata | None


class CompletionDeleted(BaseModel):
    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: bool = True


class CompletionList(ListPage):
    """Stored completions."""

    data: list[ChatCompletion]


class StoredMessages(ListPage):
    """Messages that a stored completion answers, each with an id."""

    data: list[dict[str, Any]]
