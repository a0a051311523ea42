"""`POST /v1/completions`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from coserve.serve.answering.answers import AnswerPiece, Scored
from coserve.serve.answering.logprobs import completion_logprobs
from coserve.serve.answering.replies import choice_fields, common_fields, finish_name, reply
from coserve.serve.answering.request_builder import GenerationRequest, RequestBuilder
from coserve.serve.errors import error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.schema.common import Usage
from coserve.serve.schema.completions import (
    CompletionChoice,
    CompletionRequest,
    CreateCompletionResponse,
)
from coserve.serve.state import Shared
from coserve.text import Text

router = APIRouter(route_class=JsonRoute, tags=["Answers"])


@router.post(
    "/v1/completions",
    response_model=CreateCompletionResponse,
    responses=error_responses(404, 500),
    summary="Continue a text",
)
async def create_completion(
    body: CompletionRequest, request: Request, caller: Caller, state: Shared
) -> Response:
    """Continues texts or token ids, whole or (`stream`) as server-sent events that end with `data: [DONE]`.

    With `echo` and `max_tokens` 0 it only scores the prompt.
    """
    generation = await (await RequestBuilder.of(state, caller, body.model)).completion(body)
    shape = _CompletionFormat(state.text, generation, body)
    return await reply(request, state, generation, shape, body)


class _CompletionFormat:
    def __init__(self, text: Text, generation: GenerationRequest, body: CompletionRequest) -> None:
        self._text, self._generation = text, generation
        self._echo, self._logprobs = bool(body.echo), body.logprobs
        self._offsets: dict[int, int] = {}  # by answer: characters before its own
        self._common: dict[str, Any] = {"object": "text_completion", **common_fields(generation)}
        self._usage: dict[str, Any] = {"usage": None} if body.includes_usage else {}

    def chunks(self, piece: AnswerPiece) -> Iterator[CreateCompletionResponse]:
        yield CreateCompletionResponse(choices=[self._choice(piece)], **self._common, **self._usage)

    def usage_chunk(self, usage: Usage) -> CreateCompletionResponse:
        return CreateCompletionResponse(choices=[], usage=usage, **self._common)

    def whole(self, answers: list[AnswerPiece], usage: Usage) -> CreateCompletionResponse:
        return CreateCompletionResponse(
            choices=[self._choice(piece) for piece in answers], usage=usage, **self._common
        )

    def _choice(self, piece: AnswerPiece) -> CompletionChoice:
        prompt, is_first = self._generation.prompt(piece.index), piece.index not in self._offsets
        echoed = self._text.decode(prompt) if is_first and self._echo else ""
        offset = self._offsets.setdefault(piece.index, len(echoed))
        asked = choice_fields(self._generation, piece)
        if self._generation.tells_tokens and is_first:
            asked["prompt_token_ids"] = list(prompt)
        logprobs = None
        if self._logprobs is not None:
            scored = [replace(one, start=one.start + offset) for one in piece.scored]
            before = self._scored_prompt(piece) if is_first and self._echo else []
            logprobs = completion_logprobs(self._text, [*before, *scored], self._logprobs)
        return CompletionChoice(
            index=piece.index,
            text=echoed + piece.text,
            logprobs=logprobs,
            finish_reason=None if piece.finish is None else finish_name(piece.finish),
            **asked,
        )

    def _scored_prompt(self, piece: AnswerPiece) -> list[Scored]:
        prompt = self._generation.prompt(piece.index)
        scores, starts = (None, *piece.prompt_scores), self._text.starts(prompt)
        return [Scored(*one) for one in zip(prompt, scores, starts, strict=True)]
