"""HTTP replies: answers as a stream or whole, in the format of a dialect."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol
from urllib.parse import quote

from fastapi import Request, Response

from coserve.errors import CoserveError
from coserve.serve.adapter_registry.catalog import Model
from coserve.serve.answering.answers import AnswerPiece, PieceStream, answer
from coserve.serve.answering.call import Call, CallUsage
from coserve.serve.errors import ApiError, error_shape
from coserve.serve.http.json_replies import gathered, pieced, written
from coserve.serve.http.streams import ClientGone, EventStream, Pause, unless_gone
from coserve.serve.state import State
from coserve.wire.scores import Scores

_GONE = 499  # the status that proxies log for a client that left; it is never read
SMALL = 1000  # tokens and likely tokens of JSON that is made in the loop: 1 ms


class AnswerFormat(Protocol):
    """Format of a dialect's answers to one call, which `streams` them or not; `events` is called in order."""

    streams: bool

    def size(self, piece: AnswerPiece) -> int:
        """Tokens and likely tokens that the JSON of a piece tells, at most; before `events` has it."""
        ...

    def events(self, piece: AnswerPiece) -> Iterator[bytes]:
        """Events of a piece in a stream, in parts."""
        ...

    def ending(self, usage: CallUsage) -> Iterator[bytes]:
        """Events that end a stream whose answers are complete, in parts."""
        ...

    def whole(self, answers: list[AnswerPiece], usage: CallUsage) -> dict[str, Any]:
        """The whole reply; each answer is one piece."""
        ...


Keep = Callable[[CallUsage], Awaitable[None]]


async def reply(
    request: Request, state: State, call: Call, shape: AnswerFormat, keep: Keep | None = None
) -> Response:
    """The HTTP response to a call; cancels its work when the client disconnects. `keep` is awaited once all
    answers are complete and `shape` has read them, before the client is told so.

    A stream's headers wait for its first piece, so that earlier errors have their own status.
    """
    pieces = answer(state, call)
    try:
        if not shape.streams:
            whole = await unless_gone(request.receive, _whole(state, pieces, call, shape, keep))
            kept = None if call.stated is None else call.clock.kept(call.stated)
            whole.headers.update(_headers(call, kept))
            return whole
        first = await unless_gone(request.receive, anext(pieces))
    except ClientGone:
        return Response(status_code=_GONE)
    stream = EventStream(_events(request, state, first, pieces, call, shape, keep), pieces)
    known = None if call.stated is None else call.clock.kept_by_first(call.stated)
    stream.headers.update(_headers(call, known))
    return stream


def version_header(model: Model) -> dict[str, str]:
    """The header that names the version of an answer."""
    return {"x-coserve-version": quote(model.key or model.name)}


def _headers(call: Call, kept: bool | None) -> dict[str, str]:
    """Headers of the reply to a call: where it waited and how long, the version that answers, and whether its
    own bounds were kept, where that is known."""
    told = {
        "x-coserve-queue-place": str(call.clock.place),
        "x-coserve-queue-seconds": f"{call.clock.queued:.4f}",
        **version_header(call.model),
    }
    return told if kept is None else {**told, "x-coserve-slo": "kept" if kept else "missed"}


async def _events(
    request: Request,
    state: State,
    first: AnswerPiece,
    rest: PieceStream,
    call: Call,
    shape: AnswerFormat,
    keep: Keep | None,
) -> AsyncGenerator[bytes, None]:
    count, cached, pause = 0, [0] * len(call), Pause()
    try:
        async for piece in _ahead(first, rest):
            count += len(piece.tokens)
            cached[piece.index] += piece.cached
            parts = shape.events(piece)
            if shape.size(piece) <= SMALL:
                yield b"".join(parts)
            else:
                pieces = gathered(parts)
                while part := await state.bodies.run(call.tenant.id, next, pieces, b""):
                    yield part
            await pause()  # pieces that are there already would be sent in one turn of the loop
        usage = CallUsage.of(call, count, cached)
        if keep is not None:
            await keep(usage)
    except CoserveError as error:  # the status is sent already: only an error event can follow
        yield error_shape(request.scope).event(ApiError.of(error), request.scope)
    else:
        yield b"".join(shape.ending(usage))


async def _ahead(first: AnswerPiece, rest: PieceStream) -> AsyncGenerator[AnswerPiece, None]:
    yield first
    async for piece in rest:
        yield piece


async def _whole(
    state: State, pieces: PieceStream, call: Call, shape: AnswerFormat, keep: Keep | None
) -> Response:
    answers = await whole_answers(pieces, len(call))
    usage = CallUsage.of(call, sum(len(one.tokens) for one in answers), [one.cached for one in answers])
    is_small = sum(map(shape.size, answers)) <= SMALL
    told = _written(shape, answers, usage)
    if keep is not None:
        told = iter(await state.bodies.run(call.tenant.id, list, told))
        await keep(usage)
    if is_small:
        return Response(b"".join(told), media_type="application/json")
    return await pieced(state.bodies, call.tenant.id, told, "application/json")


def _written(shape: AnswerFormat, answers: list[AnswerPiece], usage: CallUsage) -> Iterator[bytes]:
    """The whole reply as JSON, made where it is written: the text of long answers is read for calls."""
    yield from written(shape.whole(answers, usage))


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
        cached=sum(part.cached for part in parts),
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        starts=tuple(chain.from_iterable(part.starts for part in parts)),
        scores=Scores.joined(part.scores for part in parts),
        prompt_scores=Scores.joined(part.prompt_scores for part in parts),
    )
