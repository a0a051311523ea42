"""`/tokenize`, `/detokenize`, `/tokenizer_info`, `/version` and `/ping`, by vLLM's names."""

from typing import Annotated, Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, model_validator

from coserve.serve.answering.cost import LONGEST_NAME, MOST_MESSAGES, MOST_PROMPT_TOKENS, MOST_TOOLS
from coserve.serve.answering.request_builder import RequestBuilder
from coserve.serve.errors import ApiError, error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import json_reply
from coserve.serve.routes.chat_bodies import chat_of
from coserve.serve.schema.chat import ChatMessage, ChatRequest, TemplateVariables
from coserve.serve.schema.common import RequestBody, TokenId, Words
from coserve.serve.schema.tools import FunctionTool
from coserve.serve.state import Shared

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


router = APIRouter(route_class=JsonRoute, tags=["Tokens"])
TOKENS: Final = ("/tokenize", "/detokenize")


class Version(BaseModel):
    version: str


@router.post(TOKENS[0], response_model=Tokenized, responses=error_responses(404), summary="Tokenize a text")
async def tokenize(body: TokenizeRequest, caller: Caller, state: Shared) -> Response:
    """Tells the tokens of a text, or of a chat as the model's template writes it."""
    builder = await RequestBuilder.of(state, caller, body.model or state.catalog.base.name)
    if body.messages is not None:
        chat = await state.bodies.run(caller.id, chat_of, _as_chat(body), state.text.markups)
        tokens = await builder.chat_tokens(chat)
    else:
        tokens = await builder.text_tokens(body.prompt or "", body.add_special_tokens is not False)
    told = {"count": len(tokens), "max_model_len": builder.hello.positions, "tokens": list(tokens)}
    if body.return_token_strs:
        told["token_strs"] = [state.text.tokens.text_of(token) for token in tokens]
    return await json_reply(state.bodies, caller.id, told)


@router.post(TOKENS[1], responses=error_responses(404), summary="Write tokens as text")
async def detokenize(body: DetokenizeRequest, caller: Caller, state: Shared) -> Detokenized:
    """Tells the text of tokens, special ones included."""
    builder = await RequestBuilder.of(state, caller, body.model or state.catalog.base.name)
    if (wrong := max(body.tokens, default=0)) >= (most := builder.hello.vocabulary):
        message = f"Invalid value for 'tokens': {wrong} is not one of the model's {most} tokens."
        raise ApiError(400, message, param="tokens", code="invalid_value")
    return Detokenized(prompt=await state.prompts.run(caller.id, state.text.decode, body.tokens, True))


@router.get("/tokenizer_info", summary="The tokenizer")
async def show_tokenizer(caller: Caller, state: Shared) -> TokenizerInfo:
    """Tells the names of the tokenizer's special tokens, and its chat template."""
    tokenizer = state.text.tokenizer
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return TokenizerInfo(tokenizer_class=type(tokenizer).__name__, chat_template=template, **special)


@router.get("/version", tags=["Health"], summary="The server's version")
async def show_version(request: Request) -> Version:
    """Tells the version of coserve."""
    return Version(version=request.app.version)


@router.get("/ping", tags=["Health"], summary="Whether the server answers", response_class=Response,
            responses={200: {"content": {"text/plain": {}}}})  # fmt: skip
@router.post("/ping", tags=["Health"], summary="Whether the server answers", include_in_schema=False)
async def ping() -> Response:
    """Answers with nothing, as SageMaker asks for."""
    return Response(media_type="text/plain")


def _as_chat(body: TokenizeRequest) -> ChatRequest:
    """The chat that is to be tokenized, as one that is to be answered."""
    return ChatRequest.model_construct(
        messages=body.messages,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=body.continue_final_message,
    )
