"""Middleware before every route: request ids, size limits, and draining.

Plain ASGI, as FastAPI's middleware puts a task and a queue between a stream and its socket.
"""

import secrets
from collections.abc import Callable

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.serve.answering.cost import MOST_HEADER_BYTES, MOST_URL_BYTES
from coserve.serve.errors import ApiError, ErrorShape, openai_shape
from coserve.wire.logs import CONTEXT, WorkContext

_LONGEST_ID = 128


class RequestIds:
    """Gives each request an id, returned in `x-request-id`, and the form of its errors, which `shape_of` has
    for a path; an id in the client's header is kept."""

    def __init__(self, app: ASGIApp, shape_of: Callable[[str], ErrorShape] = openai_shape) -> None:
        self.app, self._shape_of = app, shape_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, shape = _given_id(scope) or new_request_id(), self._shape_of(scope["path"])
        scope.setdefault("state", {}).update(request_id=request_id, error_shape=shape)
        address = scope["client"][0] if scope.get("client") else ""
        before = CONTEXT.set(WorkContext(request_id, address=address))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name in ("x-request-id", shape.id_header):
                    headers.setdefault(name, request_id)
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            CONTEXT.reset(before)


def new_request_id() -> str:
    """A new request id for logs and the client."""
    return f"req_{secrets.token_hex(16)}"


class SizeLimits:
    """Refuses URLs, headers and bodies that are too large, before they are parsed.

    `body_limit` gives the most bytes for a path. Bodies are also counted as they arrive, as their length may
    be missing or wrong.
    """

    def __init__(self, app: ASGIApp, body_limit: Callable[[str], int]) -> None:
        self.app, self.body_limit = app, body_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADER_BYTES:
            message = f"The headers are larger than {MOST_HEADER_BYTES} bytes."
            await ApiError(431, message).response()(scope, receive, send)
            return
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MOST_URL_BYTES:
            message = f"The URL is longer than {MOST_URL_BYTES} bytes."
            await ApiError(414, message).response()(scope, receive, send)
            return
        most = self.body_limit(scope["path"])
        message = f"The body is larger than {most} bytes."
        if content_length(scope) > most:
            await ApiError(413, message).response()(scope, receive, send)
            return
        seen = 0

        async def receive_counted() -> Message:
            nonlocal seen
            received = await receive()
            seen += len(received.get("body", b""))
            if seen > most:
                # FastAPI lets its own exception through where it reads a body, and turns all others into 400.
                raise HTTPException(413, message)
            return received

        await self.app(scope, receive_counted, send)


class Draining:
    """Answers 503 to new work once the server drains; reads are still allowed."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self.app, self.is_draining = app, is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD") and self.is_draining():
            refusal = ApiError(
                503, "The server is shutting down.", code="draining", headers={"Retry-After": "5"}
            )
            await refusal.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _given_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    # A space in it would let a client write fields of its own into a line of the text log.
    is_sane = given.isascii() and given.isprintable() and " " not in given
    return given if is_sane and len(given) <= _LONGEST_ID else ""


def content_length(scope: Scope) -> int:
    """The request's Content-Length in bytes; 0 if missing."""
    given = Headers(scope=scope).get("content-length", "")
    return int(given) if given.isascii() and given.isdigit() and len(given) < 19 else 0
