"""`/tokenize` and `/detokenize`, vLLM's."""

from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from coserve.serve.answering.cost import LONGEST_NAME, MOST_MESSAGES, MOST_PROMPT_TOKENS, MOST_TOOLS
from coserve.serve.schema.chat import ChatMessage, TemplateVariables
from coserve.serve.schema.common import RequestBody, TokenId, Words
from coserve.serve.schema.tools import FunctionTool

ModelName = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class TokenizeRequest(RequestBody):
    """A text, or a chat, whose tokens are told."""

    model: ModelName | None = None
    prompt: Words | None = None
    messages: (
        Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)] | None
    ) = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool | None = Field(None, description="Of a text; true. A chat has its template's.")
    add_generation_prompt: bool | None = Field(None, description="True unless continue_final_message.")
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages is needed")
        if self.add_generation_prompt is not None and self.add_generation_prompt == bool(
            self.continue_final_message
        ):
            raise ValueError("exactly one of add_generation_prompt and continue_final_message may be true")
        if self.continue_final_message and self.messages and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs a last message of the role assistant")
        return self


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Token ids whose text is told."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_PROMPT_TOKENS)]


class Detokenized(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """As vLLM tells of a tokenizer."""

    tokenizer_class: str
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
