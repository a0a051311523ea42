"""Ends answers under way within about a second after their key is revoked."""

import asyncio
import logging
from collections.abc import Collection

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.errors import StateError
from coserve.serve.errors import ApiError, error_shape
from coserve.serve.http.auth import cookie_of, secret_of
from coserve.serve.store.keys import digest_of
from coserve.serve.store.tenants import TenantStore

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # seconds between two checks of the database, where other processes revoke keys


class Revocation:
    """Cancels requests to `paths` whose key is revoked: a stream ends with an error event, and a request
    without an answer yet gets 401.

    Runs after `Authentication`. One query checks all keys, and only while there are requests.
    """

    def __init__(self, app: ASGIApp, tenants: TenantStore, paths: Collection[str]) -> None:
        self.app, self._tenants, self._paths = app, tenants, frozenset(paths)
        self._open: dict[bytes, set[asyncio.Timeout]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        concerned = scope["type"] == "http" and scope["path"] in self._paths
        request = HTTPConnection(scope) if concerned else None
        secret = None if request is None else secret_of(request) or cookie_of(request)
        if secret is None:
            await self.app(scope, receive, send)
            return
        has_begun = has_ended = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun, has_ended
            has_begun = True
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        key, ending = digest_of(secret), asyncio.timeout(None)
        try:
            async with ending:
                self._enter(key, ending)
                await self.app(scope, receive, send_noted)
        except TimeoutError:
            if not ending.expired():
                raise
            refusal = ApiError(
                401, "Your API key was revoked while this was being answered.", code="key_revoked"
            )
            if not has_begun:
                await refusal.response()(scope, receive, send)
            elif not has_ended:  # a stream: a whole answer is sent in one piece
                last = error_shape(scope).event(refusal, scope)
                await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._leave(key, ending)

    def _enter(self, key: bytes, ending: asyncio.Timeout) -> None:
        self._open.setdefault(key, set()).add(ending)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="revocation")

    def _leave(self, key: bytes, ending: asyncio.Timeout) -> None:
        self._open[key].discard(ending)
        if not self._open[key]:
            del self._open[key]

    async def _watch(self) -> None:
        """Checks keys until no request is left."""
        while self._open:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                revoked = await self._tenants.revoked(tuple(self._open)) if self._open else ()
            except StateError as error:
                log.warning("whose key has been revoked cannot be seen now: %s", error)
                continue
            now = asyncio.get_running_loop().time()
            for ending in [one for key in revoked for one in self._open.get(key, ())]:
                if not ending.expired():
                    ending.reschedule(now)
