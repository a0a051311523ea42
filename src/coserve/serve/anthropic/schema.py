"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`. Parameters that are not supported are refused by
name."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coserve.serve.answering.cost import LONGEST_NAME, MOST_MESSAGES, MOST_PARTS
from coserve.serve.schema.common import MOST_TOKEN_ID, RequestBody, StopStrings, Words
from coserve.serve.schema.unsupported import refuse_part, without

_HELLO: Any = {
    "model": "coserve-tiny", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello!"}],
}  # fmt: skip
# The values that ask for nothing, and may therefore stand there; null is one for all.
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "tools": ([],),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
    "output_config": ({},),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}),
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
    "speed": ("standard",),
}
StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class CacheControl(RequestBody):
    """A mark up to which a prompt is to be cached: accepted, as all prompts are."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlockParam(RequestBody):
    """A piece of a message's text."""

    type: Literal["text"]
    text: Words
    cache_control: CacheControl | None = None
    citations: Annotated[list[None], Field(max_length=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, block: Any) -> Any:
        if isinstance(block, dict) and isinstance(kind := block.get("type"), str) and kind != "text":
            refuse_part(kind)
        return block


Content = Words | Annotated[list[TextBlockParam], Field(fail_fast=True, max_length=MOST_PARTS)]


class MessageParam(RequestBody):
    """One turn; neighbouring ones of one role are one."""

    role: Literal["user", "assistant", "system"]
    content: Content


class MessageMetadata(RequestBody):
    user_id: str | None = Field(None, max_length=4096, description="Accepted, not used.")


class MessagePrompt(RequestBody):
    """A chat: what its tokens follow from."""

    model: str = Field(min_length=1, max_length=LONGEST_NAME, description="The base model, or an adapter.")
    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    system: Content | None = Field(None, description="The first turn, of the role `system`.")
    cache_control: CacheControl | None = Field(None, description="Accepted: all prompts are cached.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        return without(body, _UNSUPPORTED)


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


class TextBlock(BaseModel):
    """The text of an answer."""

    type: Literal["text"] = "text"
    text: str


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
    content: list[TextBlock]
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
