"""Asks the server's own routes, as a request over HTTP would, without a connection."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, FastAPI

from coserve.serve import errors
from coserve.serve.answering.call import IN_BACKGROUND
from coserve.serve.http.middleware import new_request_id
from coserve.serve.responses.background import ResponseRuns
from coserve.serve.state import State
from coserve.serve.store.records import Tenant

log = logging.getLogger(__name__)
Reply = tuple[int, str, bytes]  # status, id of the request, body
_BUG: Final = errors.ApiError(500, "The server had an error while processing your request.")


class OwnRoutes:
    """Some of the server's routes, for requests of its own in the background. A tenant's requests are checked
    as those from outside are, but for keys, rates and the queue."""

    def __init__(
        self,
        state: State,
        responses: ResponseRuns,
        *routers: APIRouter,
        shape_of: Callable[[str], errors.ErrorShape] = errors.openai_shape,
    ) -> None:
        """`shape_of` has the form of errors of a path."""
        self._shape_of = shape_of
        self._app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        self._app.state.coserve, self._app.state.responses = state, responses
        errors.install(self._app)
        for router in routers:
            self._app.include_router(router)

    def written(self, path: str, error: errors.ApiError) -> bytes:
        """An error as a request to this path would get it."""
        return self._shape_of(path).written(error, "")

    async def ask(self, tenant: Tenant, path: str, body: bytes) -> Reply:
        """POSTs JSON to a path. Cancelling it cancels the request's work."""
        request, status, pieces, given = new_request_id(), 500, list[bytes](), [body]
        IN_BACKGROUND.set(True)

        async def receive() -> dict[str, Any]:
            if given:
                return {"type": "http.request", "body": given.pop(), "more_body": False}
            await asyncio.get_running_loop().create_future()  # the client stays
            raise AssertionError

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            pieces.append(message.get("body", b""))

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "query_string": b"", "scheme": "http", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
            "state": {"tenant": tenant, "request_id": request, "error_shape": self._shape_of(path)},
        }  # fmt: skip
        try:
            await self._app(scope, receive, send)
        except Exception:  # the routes' own handler has answered, and raises it again
            log.exception("request %s of a batch failed", request)
            return 500, request, self._shape_of(path).written(_BUG, request)
        return status, request, b"".join(pieces)
