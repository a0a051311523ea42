"""Ends answers under way within about a second after their key is revoked, or their login has ended."""

import asyncio
import logging
from collections.abc import Collection
from typing import Final, NamedTuple

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.errors import StateError
from coserve.serve.errors import ApiError, error_shape
from coserve.serve.http.auth import cookie_of, secret_of
from coserve.serve.store.keys import digest_of
from coserve.serve.store.logins import LoginStore
from coserve.serve.store.tenants import LOCAL, TenantStore

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # seconds between two checks of the database, where other processes revoke keys
_REVOKED: Final = ApiError(401, "Your API key was revoked while this was being answered.", code="key_revoked")
_LOGGED_OUT: Final = ApiError(401, "You were logged out while this was being answered.", code="logged_out")


class _Secret(NamedTuple):
    """A request was let in with this: a key, or a login's cookie, by its digest."""

    digest: bytes
    is_login: bool


class Revocation:
    """Cancels requests whose key is revoked or whose login has ended: a stream ends with an error event, and
    a request without an answer yet gets 401.

    It concerns requests to `paths`, and reads below `streams`, as those may follow something for days. Runs
    after `Authentication`. One query checks all keys, and only while there are requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        tenants: TenantStore,
        logins: LoginStore,
        paths: Collection[str],
        streams: tuple[str, ...],
    ) -> None:
        self.app, self._tenants, self._logins = app, tenants, logins
        self._paths, self._streams = frozenset(paths), streams
        self._open: dict[_Secret, set[asyncio.Timeout]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = self._secret(scope) if scope["type"] == "http" else None
        if key is None:
            await self.app(scope, receive, send)
            return
        has_begun = has_ended = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun, has_ended
            has_begun = True
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        ending = asyncio.timeout(None)
        try:
            async with ending:
                self._enter(key, ending)
                await self.app(scope, receive, send_noted)
        except TimeoutError:
            if not ending.expired():
                raise
            refusal = _LOGGED_OUT if key.is_login else _REVOKED
            if not has_begun:
                await refusal.response()(scope, receive, send)
            elif not has_ended:  # a stream: a whole answer is sent in one piece
                last = error_shape(scope).event(refusal, scope)
                await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._leave(key, ending)

    def _secret(self, scope: Scope) -> _Secret | None:
        """The key or the cookie of a request that is to end with it; None for others, and for those that need
        none."""
        path, is_read = scope["path"], scope["method"] == "GET"
        if not (path in self._paths or (is_read and path.startswith(self._streams))):
            return None
        if scope.get("state", {}).get("tenant") is LOCAL:
            return None
        request = HTTPConnection(scope)
        secret, cookie = secret_of(request), cookie_of(request)
        given = secret or cookie
        return None if given is None else _Secret(digest_of(given), secret is None)

    def _enter(self, key: _Secret, ending: asyncio.Timeout) -> None:
        self._open.setdefault(key, set()).add(ending)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="revocation")

    def _leave(self, key: _Secret, ending: asyncio.Timeout) -> None:
        self._open[key].discard(ending)
        if not self._open[key]:
            del self._open[key]

    async def _watch(self) -> None:
        """Checks keys until no request is left."""
        while self._open:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                over = await self._over()
            except StateError as error:
                log.warning("whose key has been revoked cannot be seen now: %s", error)
                continue
            now = asyncio.get_running_loop().time()
            for ending in [one for key in over for one in self._open.get(key, ())]:
                if not ending.expired():
                    ending.reschedule(now)

    async def _over(self) -> list[_Secret]:
        """The keys and logins among those of requests under way that are in force no longer."""
        asked = list(self._open)
        keys = [one.digest for one in asked if not one.is_login]
        logins = [one.digest for one in asked if one.is_login]
        revoked = await self._tenants.revoked(keys) if keys else frozenset()
        valid = await self._logins.valid(logins) if logins else frozenset()
        return [one for one in asked if (one.digest not in valid if one.is_login else one.digest in revoked)]
