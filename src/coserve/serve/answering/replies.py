"""HTTP replies: answers as a stream or whole, in the endpoint's format."""

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

from fastapi import Request, Response
from pydantic import BaseModel

from coserve.core.request import FinishReason
from coserve.errors import CoserveError
from coserve.serve.answering.answers import AnswerPiece, PieceStream, answer
from coserve.serve.answering.request_builder import GenerationRequest
from coserve.serve.errors import ApiError
from coserve.serve.http.streams import DONE, ClientGone, EventStream, event, unless_gone
from coserve.serve.schema.common import FinishName, Generation, PromptTokensDetails, Usage
from coserve.serve.state import State

_GONE = 499  # the status that proxies log for a client that left; it is never read


class AnswerFormat(Protocol):
    """Format of one endpoint's answers, for one request; `chunks` is called in order."""

    def chunks(self, piece: AnswerPiece) -> Iterator[BaseModel]:
        """Stream chunks of a piece, without unset fields."""
        ...

    def usage_chunk(self, usage: Usage) -> BaseModel:
        """The last chunk of a stream, with the usage."""
        ...

    def whole(self, answers: list[AnswerPiece], usage: Usage) -> BaseModel:
        """The whole reply; each answer is one piece."""
        ...


def common_fields(generation: GenerationRequest) -> dict[str, Any]:
    """Fields common to all answers and chunks of a request."""
    return {
        "id": generation.id,
        "created": generation.created,
        "model": generation.model.name,
        "service_tier": generation.tier,
        "system_fingerprint": generation.fingerprint,
    }


def choice_fields(generation: GenerationRequest, piece: AnswerPiece) -> dict[str, Any]:
    """Fields common to the choices of all answers and chunks; optional ones only where requested."""
    fields: dict[str, Any] = {"token_ids": list(piece.tokens)} if generation.tells_tokens else {}
    return fields | ({"chain": piece.chain} if piece.chain and generation.tells_chain else {})


async def reply(
    request: Request, state: State, generation: GenerationRequest, shape: AnswerFormat, body: Generation
) -> Response:
    """The HTTP response to a request; cancels its work when the client disconnects.

    A stream's headers wait for its first piece, so that earlier errors have their own status.
    """
    pieces = answer(state, generation)
    try:
        if not body.stream:
            whole = await unless_gone(request.receive, _whole(pieces, generation, shape))
            return Response(whole, media_type="application/json")
        first = await unless_gone(request.receive, anext(pieces))
    except ClientGone:
        return Response(status_code=_GONE)
    return EventStream(_events(first, pieces, generation, shape, body.includes_usage), pieces)


def finish_name(reason: FinishReason) -> FinishName:
    """A finish reason in OpenAI's terms."""
    return "length" if reason is FinishReason.LENGTH else "stop"


async def _events(
    first: AnswerPiece,
    rest: PieceStream,
    generation: GenerationRequest,
    shape: AnswerFormat,
    tells_usage: bool,
) -> AsyncGenerator[bytes, None]:
    written, cached = 0, [0] * len(generation)
    try:
        async for piece in _ahead(first, rest):
            written += len(piece.tokens)
            cached[piece.index] += piece.cached
            yield b"".join(event(chunk.model_dump_json(exclude_unset=True)) for chunk in shape.chunks(piece))
    except CoserveError as error:  # the status is sent already: only an error event can follow
        yield event(json.dumps(ApiError.of(error).body()))
    else:
        if tells_usage:
            chunk = shape.usage_chunk(_usage(generation, written, cached))
            yield event(chunk.model_dump_json(exclude_unset=True))
    yield DONE


async def _ahead(first: AnswerPiece, rest: PieceStream) -> AsyncGenerator[AnswerPiece, None]:
    yield first
    async for piece in rest:
        yield piece


async def _whole(pieces: PieceStream, generation: GenerationRequest, shape: AnswerFormat) -> str:
    parts: list[list[AnswerPiece]] = [[] for _ in range(len(generation))]
    async with aclosing(pieces):
        async for piece in pieces:
            parts[piece.index].append(piece)
    answers = [join(of_one) for of_one in parts]
    usage = _usage(generation, sum(len(one.tokens) for one in answers), [one.cached for one in answers])
    return shape.whole(answers, usage).model_dump_json(exclude_unset=True)


def join(parts: Sequence[AnswerPiece]) -> AnswerPiece:
    """All pieces of one answer as one."""
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        scored=tuple(chain.from_iterable(part.scored for part in parts)),
        scores=tuple(chain.from_iterable(part.scores for part in parts)),
        prompt_scores=tuple(chain.from_iterable(part.prompt_scores for part in parts)),
    )


def _usage(generation: GenerationRequest, written: int, cached: Sequence[int]) -> Usage:
    """Token counts of a request. A prompt with several answers counts once, with the fewest cached tokens."""
    read = sum(map(len, generation.prompts))
    found = sum(min(cached[i : i + generation.choices]) for i in range(0, len(cached), generation.choices))
    return Usage(
        prompt_tokens=read,
        completion_tokens=written,
        total_tokens=read + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=found),
    )
