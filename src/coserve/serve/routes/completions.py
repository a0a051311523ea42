"""`POST /v1/completions`."""

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from coserve.serve.answering.answers import AnswerPiece
from coserve.serve.answering.logprobs import LogprobWriter
from coserve.serve.answering.replies import choice_fields, common_fields, finish_name, reply
from coserve.serve.answering.request_builder import GenerationRequest, RequestBuilder
from coserve.serve.errors import error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import WrittenJson, written_later
from coserve.serve.schema.common import JsonObject
from coserve.serve.schema.completions import CompletionRequest, CreateCompletionResponse
from coserve.serve.state import Shared
from coserve.text import Text
from coserve.wire.scores import Scores

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
    shape = _CompletionFormat(state.text, state.logprobs, generation, body)
    return await reply(request, state, generation, shape)


class _CompletionFormat:
    def __init__(
        self, text: Text, writer: LogprobWriter, generation: GenerationRequest, body: CompletionRequest
    ) -> None:
        self._text, self._writer, self._generation = text, writer, generation
        self._echo, self._logprobs = bool(body.echo), body.logprobs
        self._offsets: dict[int, int] = {}  # by answer that has begun: characters before its own
        self._common: dict[str, Any] = {"object": "text_completion", **common_fields(generation)}
        self._usage: dict[str, Any] = {"usage": None} if body.includes_usage else {}

    def size(self, piece: AnswerPiece) -> int:
        echoed = len(self._generation.prompt(piece.index)) if piece.index not in self._offsets else 0
        scores = len(piece.scores.ids) + len(piece.prompt_scores.ids)
        return len(piece.tokens) + (echoed if self._echo else 0) + scores // 4

    def chunks(self, piece: AnswerPiece) -> Iterator[JsonObject]:
        yield {**self._common, **self._usage, "choices": [self._choice(piece)]}

    def usage_chunk(self, usage: JsonObject) -> JsonObject:
        return {**self._common, "choices": [], "usage": usage}

    def whole(self, answers: list[AnswerPiece], usage: JsonObject) -> JsonObject:
        choices = [WrittenJson(written_later(self._choice, piece)) for piece in answers]
        return {**self._common, "choices": choices, "usage": usage}

    def _choice(self, piece: AnswerPiece) -> JsonObject:
        prompt, is_first = self._generation.prompt(piece.index), piece.index not in self._offsets
        echoed = self._text.decode(prompt) if is_first and self._echo else ""
        offset = self._offsets.setdefault(piece.index, len(echoed))
        asked = choice_fields(self._generation, piece)
        if self._generation.body.return_token_ids and is_first:
            asked["prompt_token_ids"] = list(prompt)
        logprobs = None
        if self._logprobs is not None:
            count = len(piece.starts)  # those of the text: the token that ends an answer is not told
            tokens, scores = piece.tokens[:count], piece.scores.rows(0, count)
            starts = [start + offset for start in piece.starts]
            if is_echo := is_first and self._echo:
                tokens, starts = (*prompt, *tokens), [*self._text.starts(prompt), *starts]
                scores = Scores.joined((piece.prompt_scores, scores))
            logprobs = self._writer.completion(tokens, starts, scores, self._logprobs, is_echo)
        return {
            "index": piece.index,
            "text": echoed + piece.text,
            "logprobs": logprobs,
            "finish_reason": None if piece.finish is None else finish_name(piece.finish),
            **asked,
        }
