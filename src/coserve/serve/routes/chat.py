"""`POST /v1/chat/completions`."""

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
from coserve.serve.http.json_replies import WrittenJson
from coserve.serve.schema.chat import ChatCompletion, ChatRequest
from coserve.serve.schema.common import JsonObject
from coserve.serve.state import Shared

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
    return await reply(request, state, generation, _ChatFormat(state.logprobs, generation))


class _ChatFormat:
    def __init__(self, writer: LogprobWriter, generation: GenerationRequest) -> None:
        self._writer, self._generation = writer, generation
        self._has_begun = False
        self._common = common_fields(generation)
        self._usage: dict[str, Any] = {"usage": None} if generation.body.includes_usage else {}

    def size(self, piece: AnswerPiece) -> int:
        return len(piece.tokens) * (1 + piece.scores.width)

    def chunks(self, piece: AnswerPiece) -> Iterator[JsonObject]:
        if not self._has_begun:  # clients expect first chunks in the order of the answers
            self._has_begun = True
            yield from map(self._first_chunk, range(len(self._generation)))
        yield self._chunk({
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece),
            "finish_reason": None if piece.finish is None else finish_name(piece.finish),
            **choice_fields(self._generation, piece),
        })  # fmt: skip

    def usage_chunk(self, usage: JsonObject) -> JsonObject:
        return {"object": "chat.completion.chunk", **self._common, "choices": [], "usage": usage}

    def whole(self, answers: list[AnswerPiece], usage: JsonObject) -> JsonObject:
        choices = [self._choice(piece) for piece in answers]
        whole = {"object": "chat.completion", **self._common, "choices": choices, "usage": usage}
        return whole | self._prompt_ids()

    def _choice(self, piece: AnswerPiece) -> JsonObject:
        assert piece.finish is not None
        return {
            "index": piece.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece),
            "finish_reason": finish_name(piece.finish),
            **choice_fields(self._generation, piece),
        }

    def _first_chunk(self, index: int) -> JsonObject:
        delta = {"role": "assistant", "content": ""}
        first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk(first) | self._prompt_ids()

    def _chunk(self, choice: JsonObject) -> JsonObject:
        return {"object": "chat.completion.chunk", **self._common, **self._usage, "choices": [choice]}

    def _prompt_ids(self) -> dict[str, Any]:
        if not self._generation.body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._generation.prompts[0])}

    def _logprobs(self, piece: AnswerPiece) -> WrittenJson | None:
        if self._generation.asked.sampling.logprobs is None:
            return None
        count = len(piece.starts)  # those of the text: the token that ends an answer is not told
        return self._writer.chat(piece.tokens[:count], piece.scores.rows(0, count))
