"""JSON replies of any size: large ones are made beside the event loop, a piece at a time, as the client takes
them.

An encoder holds the interpreter until it has ended (50 MB: 0.3 s), also on a thread, and a reply that is made
in the loop stops all streams. A piece takes some milliseconds; it is made when the one before has been sent,
so a client that reads slowly does not have its whole reply in memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, Final, TypeVarTuple

import msgspec
from fastapi import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from coserve.serve.http.streams import ClientGone, unless_gone
from coserve.serve.offload import Offload

Given = TypeVarTuple("Given")
PIECE: Final = 1 << 17  # bytes that are made at once: 2 ms of log-probabilities
_LONG: Final = 4096  # items of a list that are encoded at once
_encode = msgspec.json.Encoder(enc_hook=lambda value: msgspec.Raw(_member(value))).encode


class WrittenJson:
    """A part of a reply that is JSON already, made as it is taken: `pieces`, which may be taken once."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = pieces


def written(value: Any) -> Iterator[bytes]:
    """A value as JSON in parts: objects and lists by their members, pydantic's models and `WrittenJson` as
    they are."""
    match value:
        case WrittenJson():
            yield from value.pieces
        case Mapping():
            before = b"{"
            for name, inner in value.items():
                yield before + _encode(str(name)) + b":"
                yield from written(inner)
                before = b","
            yield b"}" if value else b"{}"
        case list() | tuple() if value and isinstance(
            value[0], Mapping | BaseModel | WrittenJson | list | tuple
        ):
            yield from _listed(map(written, value))
        case list() | tuple() if len(value) > _LONG:
            parts = (value[at : at + _LONG] for at in range(0, len(value), _LONG))
            yield from _listed([_encode(part)[1:-1]] for part in parts)
        case _:
            yield _encode(value)


def encoded(value: Any) -> bytes:
    """A small value as JSON: the same bytes as `written`'s, in a tenth of its time."""
    return _encode(value)


def written_later(make: Callable[[*Given], Any], *given: *Given) -> Iterator[bytes]:
    """As `written`, of a value that is made once its first part is taken."""
    yield from written(make(*given))


def gathered(parts: Iterable[bytes], most: int = PIECE) -> Iterator[bytes]:
    """The same bytes in pieces of about `most`."""
    held, size = list[bytes](), 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= most:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def cut(data: bytes) -> Iterator[bytes]:
    """The same bytes in pieces, to be sent one after the other."""
    return (data[at : at + PIECE] for at in range(0, len(data), PIECE))


async def json_reply(
    offload: Offload, tenant: str, value: Any, media_type: str = "application/json"
) -> Response:
    """The reply with this value, as `written` takes it. It is made on a thread; a small one whole."""
    return await pieced(offload, tenant, written(value), media_type)


async def pieced(offload: Offload, tenant: str, parts: Iterable[bytes], media_type: str) -> Response:
    """The reply with these bytes, which are made on a thread: whole where they are few, else in pieces."""
    pieces = gathered(parts)
    first = await offload.run(tenant, next, pieces, b"")
    second = await offload.run(tenant, next, pieces, b"") if len(first) >= PIECE else b""
    if not second:
        return Response(first, media_type=media_type)
    return _Pieces(offload, tenant, chain((first, second), pieces), media_type)


class _Pieces(Response):
    """A reply without a length, each of whose pieces is made once the one before has been taken."""

    def __init__(self, offload: Offload, tenant: str, pieces: Iterator[bytes], media_type: str) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._offload, self._tenant, self._pieces = offload, tenant, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while piece := await self._offload.run(self._tenant, next, self._pieces, b""):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _listed(members: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    before = b"["
    for member in members:
        yield before
        yield from member
        before = b","
    yield b"]" if before == b"," else b"[]"


def _member(value: Any) -> bytes:
    if isinstance(value, BaseModel):
        return value.model_dump_json(by_alias=True).encode()
    if isinstance(value, WrittenJson):
        return b"".join(value.pieces)
    raise NotImplementedError(f"{type(value).__name__} is no JSON")
