"""`POST /v1/completions`."""

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from coserve.serve.answering.answers import Piece
from coserve.serve.answering.asking import Asker, Wanted
from coserve.serve.answering.logprobs import CompletionScores
from coserve.serve.answering.replies import finish_name, reply
from coserve.serve.errors import error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.schema.common import Usage
from coserve.serve.schema.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from coserve.serve.state import Shared
from coserve.text import Text

router = APIRouter(tags=["Answers"])


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses=error_responses(404, 500),
    summary="Continue a text",
)
async def create_completion(
    body: CompletionRequest, request: Request, caller: Caller, state: Shared
) -> Response:
    """Continues texts or token ids, whole or (`stream`) as server-sent events that end with `data: [DONE]`.

    With `echo` and `max_tokens` 0 it only scores the prompt.
    """
    wanted = await (await Asker.of(state, caller, body.model)).completion(body)
    shape = _Shape(state.text, wanted, body)
    return await reply(request, state, wanted, shape, bool(body.stream), body.includes_usage)


class _Shape:
    def __init__(self, text: Text, wanted: Wanted, body: CompletionRequest) -> None:
        self._text, self._wanted, self._echo, self._logprobs = text, wanted, bool(body.echo), body.logprobs
        self._scores: dict[int, CompletionScores] = {}  # of answers that have begun
        self._common: dict[str, Any] = {
            "id": wanted.id,
            "object": "text_completion",
            "created": wanted.created,
            "model": wanted.model.name,
            "service_tier": wanted.tier,
            "system_fingerprint": wanted.fingerprint,
        }
        self._usage: dict[str, Any] = {"usage": None} if body.includes_usage else {}

    def chunks(self, piece: Piece) -> Iterator[Completion]:
        yield Completion(choices=[self._choice(piece)], **self._common, **self._usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        return Completion(choices=[], usage=usage, **self._common)

    def whole(self, answers: list[Piece], usage: Usage) -> Completion:
        return Completion(choices=[self._choice(piece) for piece in answers], usage=usage, **self._common)

    def _choice(self, piece: Piece) -> CompletionChoice:
        is_first = piece.index not in self._scores
        scores = self._scores.setdefault(piece.index, CompletionScores(self._text, self._logprobs or 0))
        prompt = self._wanted.prompt(piece.index)
        text = self._text.decode(prompt) + piece.text if is_first and self._echo else piece.text
        ids: dict[str, Any] = {}
        if self._wanted.tells_tokens:
            ids = {"token_ids": list(piece.tokens)} | ({"prompt_token_ids": list(prompt)} if is_first else {})
        return CompletionChoice(
            index=piece.index,
            text=text,
            logprobs=self._lists(piece, scores, is_first),
            finish_reason=None if piece.finish is None else finish_name(piece.finish),
            **ids,
        )

    def _lists(self, piece: Piece, scores: CompletionScores, is_first: bool) -> CompletionLogprobs | None:
        """Log-probabilities of the piece, and before the first one of the prompt if it is echoed."""
        if self._logprobs is None:
            return None
        if not (is_first and self._echo):
            return scores.of(piece.scored)
        prompt = self._wanted.prompt(piece.index)
        return scores.of([*zip(prompt, (None, *piece.prompt_scores), strict=True), *piece.scored])
