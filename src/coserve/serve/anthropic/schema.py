"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`. Parameters that are not supported are refused by
name. What only Anthropic's own service runs is kept as it came, and `hosted.py` decides about it."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from coserve.serve.answering.cost import LONGEST_NAME, MOST_BODY_BYTES, MOST_MESSAGES, MOST_PARTS, MOST_TOOLS
from coserve.serve.schema.common import (
    MOST_TOKEN_ID,
    Ignored,
    JsonObject,
    MostBytes,
    RequestBody,
    Schema,
    StopStrings,
    Words,
)
from coserve.serve.schema.tools import CallId, ToolName
from coserve.serve.schema.unsupported import refuse_part

_HELLO: Any = {
    "model": "coserve-tiny", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello!"}],
}  # fmt: skip
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class CacheControl(RequestBody):
    """A mark up to which a prompt is to be cached: accepted, as all prompts are."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Literal["global", "organization"] | None = Field(
        None, description="Accepted: a prompt is shared among the requests of its tenant."
    )


class TextBlockParam(RequestBody):
    """A piece of a message's text."""

    type: Literal["text"]
    text: Words
    cache_control: CacheControl | None = None
    citations: Annotated[list[Ignored], Field(fail_fast=True, max_length=MOST_PARTS)] | None = Field(
        None, description="Accepted, not used: the model sees the text alone."
    )

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, block: Any) -> Any:
        if isinstance(block, dict) and isinstance(kind := block.get("type"), str) and kind != "text":
            refuse_part(kind)
        return block


TextContent = Words | Annotated[list[TextBlockParam], Field(fail_fast=True, max_length=MOST_PARTS)]


class ThinkingBlockParam(RequestBody):
    """The reasoning before an earlier answer."""

    type: Literal["thinking"]
    thinking: Words
    signature: Annotated[str, Field(max_length=MOST_BODY_BYTES)] | None = Field(
        None, description="Not checked."
    )


class ToolUseBlockParam(RequestBody):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: CallId
    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    input: Annotated[JsonObject, MostBytes(MOST_BODY_BYTES)]
    cache_control: CacheControl | None = None


class ToolResultBlockParam(RequestBody):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextContent | None = None
    is_error: bool | None = Field(None, description="Accepted: what went wrong is the content's to say.")
    cache_control: CacheControl | None = None


_BLOCKS: Final = frozenset({"text", "thinking", "tool_use", "tool_result"})
_HOSTED_BLOCKS: Final = frozenset(  # calls of tools that a server ran itself, and their results
    {
        "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
        "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
        "tool_search_tool_result", "mcp_tool_use", "mcp_tool_result", "container_upload",
        "redacted_thinking",
    }
)  # fmt: skip


def kind_of(value: Any) -> str:
    """The type of a part of a body, which may have been validated; empty where it has none."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else ""


def _block_kind(block: Any) -> str:
    """The tag of a block; one without a type is a text that lacks it."""
    if (kind := kind_of(block) or "text") in _BLOCKS:
        return kind
    if kind not in _HOSTED_BLOCKS:
        refuse_part(kind)
    return "hosted"


Block = Annotated[
    Annotated[TextBlockParam, Tag("text")]
    | Annotated[ThinkingBlockParam, Tag("thinking")]
    | Annotated[ToolUseBlockParam, Tag("tool_use")]
    | Annotated[ToolResultBlockParam, Tag("tool_result")]
    | Annotated[Ignored, Tag("hosted")],
    Discriminator(_block_kind),
]
Content = Words | Annotated[list[Block], Field(fail_fast=True, max_length=MOST_PARTS)]


class ToolParam(RequestBody):
    """A tool that the answer may call."""

    name: ToolName
    description: Words | None = None
    input_schema: Schema
    type: Literal["custom"] | None = None
    strict: bool | None = Field(None, description="Refuses a schema with keywords that cannot be enforced.")
    eager_input_streaming: bool | None = Field(None, description="Accepted: inputs are always streamed.")
    cache_control: CacheControl | None = None
    allowed_callers: (
        Annotated[list[Annotated[str, Field(max_length=LONGEST_NAME)]], Field(min_length=1, max_length=16)]
        | None
    ) = Field(None, description="Has to hold `direct`: no code that calls tools runs here.")
    defer_loading: bool | None = Field(None, description="Accepted: the model sees all tools.")
    input_examples: Annotated[list[Ignored], Field(fail_fast=True, max_length=MOST_PARTS)] | None = Field(
        None, description="Accepted: chat templates have no place for examples."
    )

    @model_validator(mode="after")
    def _the_model_calls_it(self) -> "ToolParam":
        if self.allowed_callers is not None and "direct" not in self.allowed_callers:
            raise ValueError("allowed_callers has to hold 'direct': no code that calls tools runs here")
        return self


AnyTool = Annotated[
    Annotated[ToolParam, Tag("custom")] | Annotated[Ignored, Tag("hosted")],
    Discriminator(lambda tool: "custom" if kind_of(tool) in ("", "custom") else "hosted"),
]


class ToolChoiceParam(RequestBody):
    """A choice between any answer (`auto`), one that calls a tool (`any`) or this one (`tool`), and one
    that calls none."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="Whether there is one call at most.")

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> "ToolChoiceParam":
        if (self.name is None) == (self.type == "tool"):
            raise ValueError("name is needed for the type tool, and only allowed there")
        return self


class MessageParam(RequestBody):
    """One turn; neighbouring ones of one role are one."""

    role: Literal["user", "assistant", "system"]
    content: Content


class MessageMetadata(RequestBody):
    user_id: str | None = Field(None, max_length=4096, description="Accepted, not used.")


class ThinkingParam(RequestBody):
    """Turns reasoning before the answer on or off, where the chat template leaves that open."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        None, ge=1, le=MOST_TOKEN_ID, description="Accepted: max_tokens bounds reasoning and answer together."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="Accepted: reasoning is told whole."
    )
    block_binding: Ignored | None = Field(
        None, description="Accepted: reasoning that is sent back is not checked."
    )


class JsonOutput(RequestBody):
    """JSON of a schema, which the whole answer is."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(RequestBody):
    """The form of the answer, and how much the model reasons before it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Passed to chat templates that read it as reasoning_effort; no effect on others."
    )
    format: JsonOutput | None = None
    task_budget: Ignored | None = Field(None, description="Accepted: max_tokens bounds each answer.")


class MessagePrompt(RequestBody):
    """A chat: what its tokens follow from."""

    model: str = Field(min_length=1, max_length=LONGEST_NAME, description="The base model, or an adapter.")
    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    system: TextContent | None = Field(None, description="The first turn, of the role `system`.")
    cache_control: CacheControl | None = Field(None, description="Accepted: all prompts are cached.")
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = Field(
        None,
        description="Tools that the answer may call, where the model's chat template writes calls. Those "
        "that a server runs are refused, or with the server's ignore_hosted_tools left out.",
    )
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    mcp_servers: Annotated[list[Ignored], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = Field(
        None, description="Refused as tools are that a server runs."
    )
    container: Annotated[str, Field(max_length=LONGEST_NAME)] | Ignored | None = Field(
        None, description="Accepted: no code runs here. Its skills are refused as such tools are."
    )
    context_management: Ignored | None = Field(
        None, description="Edits that clear anything are refused as such tools are."
    )
    compaction: Ignored | None = Field(None, description="Refused as such tools are.")
    thread: Ignored | None = Field(None, description="Refused as such tools are.")
    billing_policy: Ignored | None = Field(None, description="Accepted: nobody is billed.")
    speed: Literal["standard", "fast"] | None = Field(None, description="Accepted, not used.")

    @property
    def own_tools(self) -> list[ToolParam]:
        """The tools that the client runs."""
        return [tool for tool in self.tools or () if isinstance(tool, ToolParam)]

    @model_validator(mode="after")
    def _choice_needs_its_tools(self) -> "MessagePrompt":
        names = [tool.name for tool in self.own_tools]
        if len(set(names)) < len(names):
            raise ValueError("tools have a name twice")
        if self.tool_choice is not None and self.tool_choice.type in ("any", "tool"):
            if not names:
                raise ValueError("tool_choice is only allowed with tools")
            if self.tool_choice.name not in (None, *names):
                raise ValueError(f"tool_choice names {self.tool_choice.name!r}, which is none of the tools")
        return self


class CountTokensRequest(MessagePrompt):
    """A chat whose tokens are counted."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{key: _HELLO[key] for key in ("model", "messages")}]}
    )


class MessagesRequest(MessagePrompt):
    """A chat to be continued."""

    model_config = ConfigDict(json_schema_extra={"examples": [_HELLO]})

    max_tokens: int = Field(ge=1, le=MOST_TOKEN_ID, description="Most tokens of the answer.")
    stop_sequences: StopStrings | None = Field(None, description="Texts that end the answer.")
    stream: bool | None = Field(None, description="Whether to send the answer piece by piece.")
    temperature: float | None = Field(None, ge=0, le=1, description="0 is greedy; 1 unless given.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MOST_TOKEN_ID, description="Keeps the likeliest k tokens.")
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="Accepted, not used.")
    inference_geo: str | None = Field(
        None, max_length=LONGEST_NAME, description="Accepted: the answer is computed on this server."
    )
    diagnostics: Ignored | None = Field(None, description="Accepted, not used.")
    user_profile_id: str | None = Field(None, max_length=4096, description="Accepted, not used.")
    fallbacks: (
        Annotated[str, Field(max_length=LONGEST_NAME)]
        | Annotated[list[Ignored], Field(fail_fast=True, max_length=MOST_PARTS)]
        | None
    ) = Field(None, description="Accepted: no other model answers in this one's place.")
    fallback_credit_token: str | None = Field(None, max_length=4096, description="Accepted, not used.")


class TextBlock(BaseModel):
    """The text of an answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(BaseModel):
    """The reasoning before an answer."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    """A call of a tool. The input of one that was cut off is empty."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: JsonObject


class MessageUsage(BaseModel):
    """Tokens of a request: read anew, found in the cache, and written."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(BaseModel):
    """A whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessageUsage


class TokensCount(BaseModel):
    input_tokens: int


class MessageErrorDetail(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    """The body of every answer that is not a success."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail
    request_id: str
