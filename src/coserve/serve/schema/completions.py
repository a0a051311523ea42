"""`/v1/completions`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coserve.serve.answering.cost import MOST_PROMPT_TOKENS, MOST_PROMPTS
from coserve.serve.schema.common import (
    CHAIN,
    MOST_TOKEN_ID,
    Alternatives,
    Choices,
    FinishName,
    StructuredGeneration,
    Tier,
    TokenId,
    Usage,
    Words,
)
from coserve.serve.schema.unsupported import without_unsupported_completion

DEFAULT_MAX_TOKENS = 16
_HELLO: Any = {"model": "coserve-tiny", "prompt": "Once upon a time", "max_tokens": 16}
TokenPrompt = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPT_TOKENS)]


class CompletionRequest(StructuredGeneration):
    """Text, or token ids, to be continued; or several of either."""

    model_config = ConfigDict(json_schema_extra={"examples": [_HELLO]})

    prompt: (
        Words
        | Annotated[list[Words], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | TokenPrompt
        | Annotated[list[TokenPrompt], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    )
    echo: bool | None = Field(None, description="The prompt comes back before the answer.")
    suffix: Words | None = Field(
        None, description="What follows the answer, for models with tokens to fill in a text's middle."
    )
    best_of: Choices | None = Field(
        None, description="How many answers are made, of which the n likeliest are told; not in streams."
    )
    logprobs: Alternatives | None = Field(None, description="Of how many of the likeliest tokens.")
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=MOST_TOKEN_ID,
        description=f"{DEFAULT_MAX_TOKENS} unless given; 0 only with echo, to score a prompt.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        return without_unsupported_completion(body)

    @model_validator(mode="after")
    def _nothing_needs_echo(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens may be 0 only with echo")
        return self

    @model_validator(mode="after")
    def _the_best_are_among_all(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError("best_of may not be less than n")
        if self.stream and self.best_of not in (None, self.n or 1):
            raise ValueError("best_of is not allowed when stream is true")
        if self.suffix and self.echo:
            raise ValueError("echo is not allowed with suffix")
        if self.prompt_logprobs is not None and self.echo and self.logprobs is not None:
            raise ValueError("prompt_logprobs is not allowed with echo and logprobs, which tell the same")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more prompts, all of one kind."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class CompletionLogprobs(BaseModel):
    """Lists with one entry for each token; the first token of a text has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None = Field(description="Null in all chunks of a stream but the last.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    chain: str | None = Field(None, description=CHAIN)
    prompt_logprobs: list[Any] | None = Field(None, description="Where they are asked for.")


class CreateCompletionResponse(BaseModel):
    """Answers, or in a stream pieces of them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    service_tier: Tier
    system_fingerprint: str
