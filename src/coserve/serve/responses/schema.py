"""Bodies of `/v1/responses` and `/v1/conversations`; what is not supported is refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler

from coserve.core.request import SamplingParams
from coserve.serve.answering.cost import LONGEST_NAME, MOST_BODY_BYTES, MOST_MESSAGES, MOST_PARTS, MOST_TOOLS
from coserve.serve.errors import ApiError
from coserve.serve.schema.chat import JsonObjectFormat, JsonSchema, TextFormat
from coserve.serve.schema.common import (
    MOST_TOKEN_ID,
    Alternatives,
    Ignored,
    JsonObject,
    ListPage,
    Metadata,
    RequestBody,
    StreamOptions,
    Tier,
    Words,
    tier_of,
)
from coserve.serve.schema.tools import CallId, FunctionDefinition, ToolName
from coserve.serve.schema.unsupported import without
from coserve.text.tools.tool import Tool

MOST_CONVERSATION_ITEMS: Final = 20  # that one request adds to a conversation
MOST_LISTED: Final = 100  # items of one page
SEALED: Final = "reasoning.encrypted_content"  # what a client asks for that keeps reasoning itself
SCORED: Final = "message.output_text.logprobs"
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "access_programs": (),
    "image": ({"context_compression": "auto"},),
}
ItemId = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
Arguments = Annotated[str, Field(max_length=MOST_BODY_BYTES)]


class ItemBody(RequestBody):
    """Base of items and their parts. Other fields are ignored: clients send back what they got."""

    model_config = ConfigDict(extra="ignore")


class TextContent(ItemBody):
    """A piece of text, of a message or of a call's result."""

    type: Literal["input_text", "output_text", "text"]
    text: Words

    @property
    def said(self) -> str:
        return self.text


class RefusalContent(ItemBody):
    """A refusal that an earlier answer consists of."""

    type: Literal["refusal"]
    refusal: Words

    @property
    def said(self) -> str:
        return self.refusal


def _known_part(part: Any) -> Any:
    if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind not in _PARTS:
        message = f"Content of type '{kind[:LONGEST_NAME]}' is not supported by this server."
        raise ApiError(400, message, param="input", code="unsupported_parameter")
    return part


_PARTS: Final = frozenset({"input_text", "output_text", "text", "refusal"})
ContentPart = Annotated[
    Annotated[TextContent | RefusalContent, Field(discriminator="type")], BeforeValidator(_known_part)
]
Content = Words | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MOST_PARTS)]


def said(content: Content) -> str:
    """The text of a content."""
    return content if isinstance(content, str) else "".join(part.said for part in content)


class MessageItem(ItemBody):
    """One message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(ItemBody):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: CallId
    name: ItemId
    arguments: Arguments


class FunctionOutputItem(ItemBody):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content


class ReasoningText(ItemBody):
    type: Literal["reasoning_text", "text"]
    text: Words


class SummaryText(ItemBody):
    type: Literal["summary_text"]
    text: Words


class ReasoningItem(ItemBody):
    """The reasoning before an earlier answer: its content, or what was `encrypted_content` in a response."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(fail_fast=True, max_length=MOST_PARTS)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MOST_PARTS)] | None = None
    encrypted_content: Words | None = None


class CompactionItem(ItemBody):
    """A summary in place of what was said before, as `/v1/responses/compact` makes it."""

    type: Literal["compaction"]
    encrypted_content: Words


class ReferenceItem(ItemBody):
    """An item that is stored."""

    type: Literal["item_reference"] = "item_reference"
    id: ItemId


KnownItem = (
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | CompactionItem | ReferenceItem
)
_KNOWN: Final = frozenset(
    {"message", "function_call", "function_call_output", "reasoning", "compaction", "item_reference"}
)


def _item_kind(item: Any) -> str:
    """The kind of an item, which a message and a reference need not name."""
    fields = item if isinstance(item, dict) else vars(item) if isinstance(item, ItemBody) else {}
    kind = fields.get("type")
    if kind is None:
        kind = "item_reference" if "id" in fields and "role" not in fields else "message"
    return kind if isinstance(kind, str) and kind in _KNOWN else "other"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ReferenceItem, Tag("item_reference")]
    | Annotated[Ignored, Tag("other")],
    Discriminator(_item_kind),
]
Input = Words | Annotated[list[Item], Field(fail_fast=True, max_length=MOST_MESSAGES)]


class ResponseTool(FunctionDefinition):
    """A function that the answer may call."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    _given: JsonObject = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler["ResponseTool"]) -> "ResponseTool":
        made = handler(value)
        made._given = value
        return made

    @property
    def shown(self) -> JsonObject:
        """The tool as templates show it: as in a chat, with its keys in the order they came in."""
        known = FunctionDefinition.model_fields
        function = {key: value for key, value in self._given.items() if key in known and value is not None}
        return {"type": "function", "function": function}

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.parameters or {}, bool(self.strict))

    @property
    def told(self) -> JsonObject:
        """The tool in a response."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "other" if isinstance(kind, str) and kind != "function" else "function"


AnyTool = Annotated[
    Annotated[ResponseTool, Tag("function")] | Annotated[Ignored, Tag("other")], Discriminator(_tool_kind)
]


class ChosenFunction(RequestBody):
    """A function that the answer has to call, or one of those that it may."""

    type: Literal["function"]
    name: ToolName


class AllowedFunctions(RequestBody):
    """Some of the tools, which the answer may call or has to."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(fail_fast=True, min_length=1, max_length=MOST_TOOLS)]


ResponseToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[ChosenFunction | AllowedFunctions, Field(discriminator="type")]
)


class JsonSchemaText(JsonSchema):
    """A schema that the text must match."""

    type: Literal["json_schema"]


class TextConfig(RequestBody):
    """The form of the answer's text."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaText, Field(discriminator="type")] | None = (
        None
    )
    verbosity: Literal["medium"] | None = None

    @property
    def schema_wanted(self) -> JsonObject | None:
        """The JSON schema that the text must match."""
        match self.format:
            case JsonObjectFormat():
                return {"type": "object"}
            case JsonSchemaText(schema_=schema):
                return {} if schema is None else schema
        return None


class ReasoningConfig(RequestBody):
    """Reasoning before the answer."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Passed to chat templates that read it; others take `none` only."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted: reasoning is told whole, and not summarized."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ConversationRef(RequestBody):
    id: ItemId


class PromptBody(RequestBody):
    """A model, and the items that an answer follows from."""

    model: str = Field(min_length=1, max_length=LONGEST_NAME, description="The base model, or an adapter.")
    input: Input | None = Field(None, description="A user's message, or items.")
    instructions: Words | None = Field(None, description="The first turn, of the role `system`.")
    previous_response_id: ItemId | None = Field(
        None, description="A stored response, whose items and those before it come first."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        return without(body, _UNSUPPORTED)

    @property
    def items(self) -> list[KnownItem | JsonObject]:
        """The items of the request."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return list(self.input or ())


class ToolsBody(PromptBody):
    """The same, with tools and a form."""

    conversation: ItemId | ConversationRef | None = Field(
        None, description="Its items come first, and those of this response are added to it."
    )
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = Field(
        None,
        description="Functions that the answer may call. Other kinds are refused, or with the server's "
        "ignore_hosted_tools left out.",
    )
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls; true.")
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Whether the oldest turns are left out where there is no room for all."
    )

    @property
    def conversation_id(self) -> str | None:
        of = self.conversation
        return of.id if isinstance(of, ConversationRef) else of

    @property
    def chosen(self) -> set[str]:
        """Names of the tools that `tool_choice` names."""
        match self.tool_choice:
            case ChosenFunction(name=name):
                return {name}
            case AllowedFunctions(tools=allowed):
                return {tool.name for tool in allowed}
        return set()

    @property
    def is_forced(self) -> bool:
        """Tells whether the answer has to call a tool."""
        choice = self.tool_choice
        return (
            choice == "required"
            or isinstance(choice, ChosenFunction)
            or (isinstance(choice, AllowedFunctions) and choice.mode == "required")
        )


class CountRequest(ToolsBody):
    """A request whose tokens are counted."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "coserve-tiny", "input": "Hello!"}]})


class CompactRequest(PromptBody):
    """A conversation that is summarized."""

    prompt_cache_key: str | None = Field(None, max_length=1024, description="Accepted, not used.")
    prompt_cache_retention: str | None = Field(None, max_length=64, description="Accepted, not used.")
    prompt_cache_options: Ignored | None = Field(None, description="Accepted, not used.")
    service_tier: Literal["auto", "default", "flex", "priority", "fast"] | None = None


class ResponseRequest(ToolsBody):
    """An answer that is wanted."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "coserve-tiny", "input": "Hello!", "max_output_tokens": 16}]
        }
    )

    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; 1 unless given.")
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    top_logprobs: Alternatives | None = Field(
        None, description="How many of the likeliest tokens `message.output_text.logprobs` have beside each."
    )
    max_output_tokens: int | None = Field(
        None, ge=1, le=MOST_TOKEN_ID, description="Most tokens of the answer; the room there is."
    )
    max_tool_calls: int | None = Field(
        None, ge=1, le=MOST_TOKEN_ID, description="Accepted: it bounds tools that a server runs."
    )
    metadata: Metadata | None = None
    include: (
        Annotated[
            list[
                Literal[
                    "reasoning.encrypted_content",
                    "message.output_text.logprobs",
                    "file_search_call.results",
                    "web_search_call.results",
                    "web_search_call.action.sources",
                    "message.input_image.image_url",
                    "computer_call_output.output.image_url",
                    "code_interpreter_call.outputs",
                ]
            ],
            Field(fail_fast=True, max_length=16),
        ]
        | None
    ) = None
    store: bool | None = Field(None, description="Whether the response is kept; true.")
    stream: bool | None = Field(None, description="Whether to send events.")
    stream_options: StreamOptions | None = None
    background: bool | None = Field(None, description="Whether the answer goes on without the client.")
    service_tier: Literal["auto", "default", "flex", "priority", "fast"] | None = None
    user: str | None = Field(None, max_length=4096, description="Accepted, not used.")
    safety_identifier: str | None = Field(None, max_length=1024, description="Accepted, not used.")
    prompt_cache_key: str | None = Field(None, max_length=1024, description="Accepted, not used.")
    prompt_cache_retention: str | None = Field(None, max_length=64, description="Accepted, not used.")
    prompt_cache_options: Ignored | None = Field(None, description="Accepted, not used.")
    client_metadata: Ignored | None = Field(None, description="Codex's: accepted, not used.")

    @model_validator(mode="after")
    def _fields_fit(self) -> "ResponseRequest":
        if self.background and not self.is_stored:
            raise ValueError("background is only allowed where the response is stored")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters, but for the length of the answer."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logprobs=self.top_logprobs or 0 if SCORED in (self.include or ()) else None,
        )

    @property
    def tier(self) -> Tier:
        return tier_of(self.service_tier)


class ConversationRequest(RequestBody):
    """A new conversation."""

    items: Annotated[list[Item], Field(fail_fast=True, max_length=MOST_CONVERSATION_ITEMS)] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(RequestBody):
    metadata: Metadata | None


class ConversationItems(RequestBody):
    """Items that are added to a conversation."""

    items: Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MOST_CONVERSATION_ITEMS)]


class InputTokens(BaseModel):
    """Tokens of a request with the beginning of the answer's turn."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseDeleted(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ConversationObject(BaseModel):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(BaseModel):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class CachedTokens(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens that were read and written."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseObject(BaseModel):
    """A response; each item of its output is a message, reasoning, or a call of a function."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]
    model: str
    output: list[JsonObject]
    error: JsonObject | None
    incomplete_details: JsonObject | None
    usage: ResponseUsage | None


class ItemList(ListPage):
    data: list[JsonObject]


class CompactedObject(BaseModel):
    """A conversation as one item, which takes its place in the input of further requests."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[JsonObject]
    usage: ResponseUsage
