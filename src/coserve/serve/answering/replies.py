"""HTTP replies: answers as a stream or whole, in the endpoint's format."""

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

from fastapi import Request, Response

from coserve.core.request import FinishReason
from coserve.errors import CoserveError
from coserve.serve.answering.answers import AnswerPiece, PieceStream, answer
from coserve.serve.answering.request_builder import GenerationRequest
from coserve.serve.errors import ApiError
from coserve.serve.http.json_replies import gathered, pieced, written
from coserve.serve.http.streams import (
    DONE,
    EVENT_BEGIN,
    EVENT_END,
    ClientGone,
    EventStream,
    Pause,
    event,
    unless_gone,
)
from coserve.serve.schema.common import FinishName, JsonObject
from coserve.serve.state import State
from coserve.wire.scores import Scores

_GONE = 499  # the status that proxies log for a client that left; it is never read
_SMALL = 1000  # tokens and likely tokens of JSON that is made in the loop: 1 ms


class AnswerFormat(Protocol):
    """Format of one endpoint's answers, for one request; `chunks` is called in order."""

    def size(self, piece: AnswerPiece) -> int:
        """Tokens and likely tokens that the JSON of a piece tells, at most; before `chunks` has it."""
        ...

    def chunks(self, piece: AnswerPiece) -> Iterator[JsonObject]:
        """Stream chunks of a piece."""
        ...

    def usage_chunk(self, usage: JsonObject) -> JsonObject:
        """The last chunk of a stream, with the usage."""
        ...

    def whole(self, answers: list[AnswerPiece], usage: JsonObject) -> JsonObject:
        """The whole reply; each answer is one piece."""
        ...


def common_fields(generation: GenerationRequest) -> dict[str, Any]:
    """Fields common to all answers and chunks of a request."""
    return {
        "id": generation.asked.id,
        "created": generation.created,
        "model": generation.model.name,
        "service_tier": generation.body.tier,
        "system_fingerprint": generation.fingerprint,
    }


def choice_fields(generation: GenerationRequest, piece: AnswerPiece) -> dict[str, Any]:
    """Fields common to the choices of all answers and chunks; optional ones only where requested."""
    fields: dict[str, Any] = {"token_ids": list(piece.tokens)} if generation.body.return_token_ids else {}
    return fields | ({"chain": piece.chain} if piece.chain and generation.tells_chain else {})


async def reply(
    request: Request, state: State, generation: GenerationRequest, shape: AnswerFormat
) -> Response:
    """The HTTP response to a request; cancels its work when the client disconnects.

    A stream's headers wait for its first piece, so that earlier errors have their own status.
    """
    pieces = answer(state, generation)
    try:
        if not generation.body.stream:
            return await unless_gone(request.receive, _whole(state, pieces, generation, shape))
        first = await unless_gone(request.receive, anext(pieces))
    except ClientGone:
        return Response(status_code=_GONE)
    return EventStream(_events(state, first, pieces, generation, shape), pieces)


def finish_name(reason: FinishReason) -> FinishName:
    """A finish reason in OpenAI's terms."""
    return "length" if reason is FinishReason.LENGTH else "stop"


async def _events(
    state: State,
    first: AnswerPiece,
    rest: PieceStream,
    generation: GenerationRequest,
    shape: AnswerFormat,
) -> AsyncGenerator[bytes, None]:
    count, cached, pause = 0, [0] * len(generation), Pause()
    try:
        async for piece in _ahead(first, rest):
            count += len(piece.tokens)
            cached[piece.index] += piece.cached
            parts = _chunks(shape, piece)
            if shape.size(piece) <= _SMALL:
                yield b"".join(parts)
            else:
                pieces = gathered(parts)
                while part := await state.bodies.run(generation.tenant.id, next, pieces, b""):
                    yield part
            await pause()  # pieces that are there already would be sent in one turn of the loop
    except CoserveError as error:  # the status is sent already: only an error event can follow
        yield event(json.dumps(ApiError.of(error).body()))
    else:
        if generation.body.includes_usage:
            chunk = shape.usage_chunk(_usage(generation, count, cached))
            yield event(b"".join(written(chunk)))
    yield DONE


def _chunks(shape: AnswerFormat, piece: AnswerPiece) -> Iterator[bytes]:
    """The events of a piece in parts."""
    for chunk in shape.chunks(piece):
        yield EVENT_BEGIN
        yield from written(chunk)
        yield EVENT_END


async def _ahead(first: AnswerPiece, rest: PieceStream) -> AsyncGenerator[AnswerPiece, None]:
    yield first
    async for piece in rest:
        yield piece


async def _whole(
    state: State, pieces: PieceStream, generation: GenerationRequest, shape: AnswerFormat
) -> Response:
    answers = await whole_answers(pieces, len(generation))
    usage = _usage(generation, sum(len(one.tokens) for one in answers), [one.cached for one in answers])
    is_small = sum(map(shape.size, answers)) <= _SMALL
    told = written(shape.whole(answers, usage))
    if is_small:
        return Response(b"".join(told), media_type="application/json")
    return await pieced(state.bodies, generation.tenant.id, told, "application/json")


async def whole_answers(pieces: PieceStream, count: int) -> list[AnswerPiece]:
    """The `count` answers that all pieces make, each as one piece."""
    parts: list[list[AnswerPiece]] = [[] for _ in range(count)]
    pause = Pause()
    async with aclosing(pieces):
        async for piece in pieces:
            parts[piece.index].append(piece)
            await pause()
    answers = []
    for of_one in parts:
        answers.append(join(of_one))
        await pause()
    return answers


def join(parts: Sequence[AnswerPiece]) -> AnswerPiece:
    """All pieces of one answer as one."""
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        starts=tuple(chain.from_iterable(part.starts for part in parts)),
        scores=Scores.joined(part.scores for part in parts),
        prompt_scores=Scores.joined(part.prompt_scores for part in parts),
    )


def _usage(generation: GenerationRequest, count: int, cached: Sequence[int]) -> JsonObject:
    """Token counts of a request. A prompt with several answers counts once, with the fewest cached tokens."""
    read = sum(map(len, generation.prompts))
    found = sum(min(cached[i : i + generation.choices]) for i in range(0, len(cached), generation.choices))
    return {
        "prompt_tokens": read,
        "completion_tokens": count,
        "total_tokens": read + count,
        "prompt_tokens_details": {"cached_tokens": found},
    }
