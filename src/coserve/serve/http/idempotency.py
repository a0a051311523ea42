"""Requests that create something, with an `Idempotency-Key`: sent again, one gets the first one's reply and
creates nothing."""

import hashlib
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote

from fastapi import HTTPException
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MAX_BOUNDARY_LENGTH, MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.errors import CoserveError
from coserve.serve.errors import ApiError
from coserve.serve.store.creations import CREATING, MOST_REPLY, Creating, CreationStore, creation_id

_LONGEST_KEY: Final = 255
_MOST_PARTS: Final = 1000  # and headers of a form that are told apart, in 20 ms; routes take fewer
_AGAIN: Final = {"idempotent-replayed": "true"}
_HEADERS: Final = ("idempotency-key", "x-idempotency-key")  # the second is that of `tinker` clients
# For routes' `openapi_extra`.
KEYED: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "description": "Sent again with the same key, a request creates nothing, and is answered as the "
            "first time. Another request with the key is answered 422, and 409 while the first is under way.",
            "schema": {
                "type": "string",
                "minLength": 1,
                "maxLength": _LONGEST_KEY,
                "pattern": "^[!-~]([ -~]*[!-~])?$",
            },
        }
    ]
}


class Idempotency:
    """Answers POSTs to `paths` that have the key of an earlier one: as that one was answered where they ask
    for the same, else 422; 409 while that one is under way.

    A key whose request created nothing, as one that was refused, is free again, as is one that is too old.
    Runs after `Authentication`, and before quotas, which do not concern what exists. For one event loop.
    """

    def __init__(self, app: ASGIApp, creations: CreationStore, paths: Collection[str]) -> None:
        self.app, self._creations, self._paths = app, creations, frozenset(paths)
        self._under_way: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _key_of(scope) if scope["type"] == "http" and scope["path"] in self._paths else None
        if key is None or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        try:
            reply = await self._reply(key, scope, receive)
        except (ApiError, CoserveError, HTTPException) as error:
            await _refusal(error).response()(scope, receive, send)
            return
        for message in reply:
            await send(message)

    async def _reply(self, key: str, scope: Scope, receive: Receive) -> list[Message]:
        """The messages of the reply. Raises ApiError."""
        _check(key)
        tenant = scope["state"]["tenant"].id
        id = creation_id(tenant, key)
        if id in self._under_way:
            raise _under_way()
        self._under_way.add(id)
        try:
            known = await self._creations.find(id)
            digest = RequestDigest(scope)
            if known is None:
                creating = Creating(id, tenant, digest.hexdigest)
                reply = await self._create(creating, digest, scope, receive)
                # One that was refused may have come late: another server has created it meanwhile.
                known = None if _is_success(reply) else await self._creations.find(id)
                if known is None:
                    return reply
        finally:
            self._under_way.discard(id)
        await digest.read(receive)  # nothing more of one that came late
        if digest.hexdigest() != known.request:
            message = "This Idempotency-Key came with another request before: a new request needs a new key."
            raise ApiError(422, message, code="idempotency_key_reused")
        if known.reply is None:
            return await self._held(_read(scope, known.location), _nothing)
        told = Response(known.reply.encode(), known.status, _AGAIN, known.content_type)
        return [
            {"type": "http.response.start", "status": told.status_code, "headers": told.raw_headers},
            {"type": "http.response.body", "body": told.body},
        ]

    async def _held(self, scope: Scope, receive: Receive) -> list[Message]:
        """The messages with which the application answers. These are few and small."""
        held: list[Message] = []

        async def hold(message: Message) -> None:
            held.append(message)

        await self.app(scope, receive, hold)
        return held

    async def _create(
        self, creating: Creating, digest: "RequestDigest", scope: Scope, receive: Receive
    ) -> list[Message]:
        """Has a request answered, and keeps the reply if it is a success."""

        async def hashed() -> Message:
            received = await receive()
            digest.take(received)
            return received

        token = CREATING.set(creating)
        try:
            reply = await self._held(scope, hashed)
        finally:
            CREATING.reset(token)
            creating.is_over = True
        if _is_success(reply):
            body = b"".join(message.get("body", b"") for message in reply)
            kind = Headers(raw=reply[0]["headers"]).get("content-type", "")
            kept = body.decode() if len(body) <= MOST_REPLY else None
            with suppress(CoserveError):  # as of a full disk: what was created is known in any case
                await self._creations.finish(creating, reply[0]["status"], kind, kept)
        return reply


class RequestDigest:
    """SHA-256 of what a request asks for: its method, its address and its body. Of a form the parts count, as
    clients draw a new boundary between them each time."""

    def __init__(self, scope: Scope) -> None:
        self._hash, self._is_whole = hashlib.sha256(), False
        for part in (scope["method"].encode(), scope["path"].encode(), scope["query_string"]):
            self._hash.update(hashlib.sha256(part).digest())
        kind, options = parse_options_header(Headers(scope=scope).get("content-type"))
        boundary = options.get(b"boundary", b"")
        self._part, self._parts = hashlib.sha256(), 0
        self._parser: MultipartParser | None = None
        if kind == b"multipart/form-data" and 0 < len(boundary) <= MAX_BOUNDARY_LENGTH:
            self._parser = MultipartParser(boundary, {
                "on_part_begin": self._between,
                "on_header_field": self._piece,
                "on_header_value": self._piece,
                "on_header_end": self._between,
                "on_headers_finished": self._between,
                "on_part_data": self._piece,
                "on_part_end": self._between,
            })  # fmt: skip

    def take(self, received: Message) -> None:
        """Adds what a message has of the body."""
        self._is_whole = received["type"] != "http.request" or not received.get("more_body", False)
        self.add(received.get("body", b""))

    def add(self, data: bytes) -> None:
        """Adds a piece of the body."""
        if self._parser is None:
            self._hash.update(data)
            return
        try:
            self._parser.write(data)
        except FormParserError:  # of what no route takes
            self._parser = None

    async def read(self, receive: Receive) -> None:
        """Adds what is left of the body."""
        while not self._is_whole:
            self.take(await receive())

    def hexdigest(self) -> str:
        """The digest of all that was added."""
        return self._hash.hexdigest()

    def _piece(self, data: bytes, start: int, end: int) -> None:
        self._part.update(memoryview(data)[start:end])

    def _between(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise FormParserError("too many parts")
        self._hash.update(self._part.digest())
        self._part = hashlib.sha256()


def _is_success(reply: list[Message]) -> bool:
    return bool(reply) and 200 <= reply[0]["status"] < 300


def _key_of(scope: Scope) -> str | None:
    headers = Headers(scope=scope)
    return next((headers[name] for name in _HEADERS if name in headers), None)


def _check(key: str) -> None:
    """Raises ApiError 400 for a key that is empty, too long, or no printable ASCII."""
    if not (0 < len(key) <= _LONGEST_KEY and key.isascii() and key.isprintable()):
        message = f"An Idempotency-Key has 1 to {_LONGEST_KEY} printable ASCII characters."
        raise ApiError(400, message, code="invalid_idempotency_key")


def _under_way() -> ApiError:
    message = "A request with this Idempotency-Key is under way: send this one again once it has ended."
    again = {"Retry-After": "1", "x-should-retry": "true"}
    return ApiError(409, message, code="idempotency_key_in_use", headers=again)


def _refusal(error: Exception) -> ApiError:
    if isinstance(error, HTTPException):  # of a body that is too large
        return ApiError(error.status_code, str(error.detail))
    assert isinstance(error, ApiError | CoserveError)
    return error if isinstance(error, ApiError) else ApiError.of(error)


def _read(scope: Scope, path: str) -> dict[str, Any]:
    """A request for what is at `path`, by the same caller."""
    dropped = (b"content-length", b"content-type", b"transfer-encoding")
    headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
    place = {"path": path, "raw_path": quote(path).encode(), "query_string": b""}
    return {**scope, "method": "GET", **place, "headers": headers}


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}
