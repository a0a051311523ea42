"""`POST /v1/chat/completions`."""

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from coserve.serve.answering.answers import AnswerPiece
from coserve.serve.answering.logprobs import chat_logprobs
from coserve.serve.answering.replies import choice_fields, common_fields, finish_name, reply
from coserve.serve.answering.request_builder import GenerationRequest, RequestBuilder
from coserve.serve.errors import error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.schema.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionDelta,
    ChatLogprobs,
    ChatRequest,
)
from coserve.serve.schema.common import Usage
from coserve.serve.state import Shared
from coserve.text import Text

router = APIRouter(route_class=JsonRoute, tags=["Answers"])


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=error_responses(404, 500),
    summary="Continue a chat",
)
async def create_chat_completion(
    body: ChatRequest, request: Request, caller: Caller, state: Shared
) -> Response:
    """Answers a chat, whole or (`stream`) as server-sent events that end with `data: [DONE]`.

    A stream goes on from where it was if the engine dies in the middle of it.
    """
    generation = await (await RequestBuilder.of(state, caller, body.model)).chat(body)
    shape = _ChatFormat(state.text, generation, body.includes_usage)
    return await reply(request, state, generation, shape, body)


class _ChatFormat:
    def __init__(self, text: Text, generation: GenerationRequest, tells_usage: bool) -> None:
        self._text, self._generation = text, generation
        self._has_begun = False
        self._common = common_fields(generation)
        self._usage: dict[str, Any] = {"usage": None} if tells_usage else {}

    def chunks(self, piece: AnswerPiece) -> Iterator[ChatChunk]:
        if not self._has_begun:  # clients expect first chunks in the order of the answers
            self._has_begun = True
            yield from map(self._first_chunk, range(len(self._generation)))
        delta = ChatCompletionDelta(content=piece.text) if piece.text else ChatCompletionDelta()
        finish = None if piece.finish is None else finish_name(piece.finish)
        choice = ChatChunkChoice(
            index=piece.index, delta=delta, logprobs=self._logprobs(piece), finish_reason=finish,
            **choice_fields(self._generation, piece),
        )  # fmt: skip
        yield self._chunk([choice])

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(choices=[], usage=usage, object="chat.completion.chunk", **self._common)

    def whole(self, answers: list[AnswerPiece], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            object="chat.completion", choices=[self._choice(piece) for piece in answers], usage=usage,
            **self._common, **self._prompt_ids(),
        )  # fmt: skip

    def _choice(self, piece: AnswerPiece) -> ChatChoice:
        assert piece.finish is not None
        return ChatChoice(
            index=piece.index,
            message=AnswerMessage(role="assistant", content=piece.text, refusal=None),
            logprobs=self._logprobs(piece),
            finish_reason=finish_name(piece.finish),
            **choice_fields(self._generation, piece),
        )

    def _first_chunk(self, index: int) -> ChatChunk:
        delta = ChatCompletionDelta(role="assistant", content="")
        return self._chunk(
            [ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)],
            **self._prompt_ids(),
        )

    def _chunk(self, choices: list[ChatChunkChoice], **more: Any) -> ChatChunk:
        return ChatChunk(
            object="chat.completion.chunk", choices=choices, **self._common, **self._usage, **more
        )

    def _prompt_ids(self) -> dict[str, Any]:
        return (
            {"prompt_token_ids": list(self._generation.prompts[0])} if self._generation.tells_tokens else {}
        )

    def _logprobs(self, piece: AnswerPiece) -> ChatLogprobs | None:
        return None if self._generation.sampling.logprobs is None else chat_logprobs(self._text, piece.scored)
