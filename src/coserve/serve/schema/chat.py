"""`/v1/chat/completions`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coserve.serve.answering.cost import MOST_MESSAGES, MOST_PARTS
from coserve.serve.schema.common import (
    CHAIN,
    MOST_TOKEN_ID,
    Alternatives,
    FinishName,
    Generation,
    Ignored,
    Metadata,
    RequestBody,
    Schema,
    Tier,
    Usage,
    Words,
)
from coserve.serve.schema.unsupported import (
    refuse_part,
    without_unsupported_chat,
    without_unsupported_message,
)

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

    role: Literal["system", "developer", "user", "assistant"]
    content: Words | Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_PARTS)]
    name: str | None = Field(None, max_length=256, description="Accepted, not used.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, message: Any) -> Any:
        return without_unsupported_message(message)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


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


class ChatRequest(Generation):
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
    metadata: Metadata | None = Field(None, description="Accepted, not used.")
    store: bool | None = Field(None, description="Accepted; nothing is kept.")
    parallel_tool_calls: bool | None = Field(None, description="Accepted; there are no tools.")
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
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName
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


class ChatCompletionDelta(BaseModel):
    """A new part of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatCompletionDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None
    token_ids: list[int] | None = None
    chain: str | None = None  # in an answer's last chunk


class ChatChunk(BaseModel):
    """A piece of an answer, as a stream brings it."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    service_tier: Tier
    system_fingerprint: str
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
