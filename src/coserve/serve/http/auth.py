"""Authentication: the tenant of an API key, or the tenant `local` on a loopback server without keys."""

import asyncio
import re
from contextlib import suppress
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from coserve.core.owners import owner_of
from coserve.errors import CoserveError, StateError
from coserve.serve.errors import ApiError
from coserve.serve.http.quotas import too_often
from coserve.serve.http.rates import TokenBuckets
from coserve.serve.state import Shared, State
from coserve.serve.store import keys
from coserve.serve.store.audit import STRANGER
from coserve.serve.store.logins import is_cookie, is_token
from coserve.serve.store.records import Tenant
from coserve.serve.store.tenants import LOCAL
from coserve.wire.logs import context

_API = ("/v1/", "/api/v1/")  # every path below these needs a tenant
_OPEN = "/api/v1/healthz"  # but this one
# These too: they show all tenants, or the server itself, or compute.
_INSIDE = ("/metrics", "/trace", "/docs", "/openapi.json", "/tokenize", "/detokenize", "/tokenizer_info")
_PAGE = "/web/api/"  # what the page asks for, beside the API
COOKIE = "coserve_login"  # on the port that its scheme has; others follow it, as in coserve_login_8000
TOKEN_HEADER = "x-coserve-token"
_MOST_NOTED = 60  # wrong keys that the audit log gets in a minute, of all addresses
_READS = ("GET", "HEAD", "OPTIONS")
_PORT = re.compile(r"[^,]*:(\d{1,5})\s*")  # at the end of a Host header
_bearer = HTTPBearer(auto_error=False, description="An API key, as `coserve keys create` prints it once.")


class Authentication:
    """Refuses unauthenticated requests before the body is read (FastAPI would read it first).

    Sets `tenant` in the request's state. Addresses that send wrong keys too often get 429, and only
    well-formed keys are looked up; valid keys are always accepted.
    """

    def __init__(self, app: ASGIApp, state: State, bad_keys: TokenBuckets) -> None:
        self.app, self.state, self._bad_keys = app, state, bad_keys
        self._looked_up: dict[tuple[object, ...], asyncio.Task[Tenant]] = {}
        self._one_by_one = asyncio.Lock()  # of addresses that guess
        self._noted, self._all_noted = TokenBuckets(1), TokenBuckets(_MOST_NOTED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _needs_tenant(scope["path"]):
            try:
                tenant = await self._tenant(HTTPConnection(scope))
            except (ApiError, CoserveError) as error:
                refusal = error if isinstance(error, ApiError) else ApiError.of(error)
                await refusal.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
            work, secret = context(), secret_of(HTTPConnection(scope))
            work.tenant = tenant.name
            if secret is not None and tenant is not LOCAL:
                work.key = keys.prefix_of(secret)
        await self.app(scope, receive, send)

    async def _tenant(self, request: HTTPConnection) -> Tenant:
        """As `tenant_of`. Raises ApiError 429 after too many 401."""
        owner = owner_of(request.client and request.client.host)
        try:
            if not self._bad_keys.wait(owner):
                return await self._together(request)
            if keys.is_shaped(secret_of(request)) or is_cookie(cookie_of(request)):
                async with self._one_by_one:
                    return await self._together(request)
        except ApiError as refusal:
            if refusal.status == 401:
                await self._note(request, owner)
            if refusal.status != 401 or not self._bad_keys.take(owner):
                raise
        what = "Too many requests without a right API key came from your address"
        raise too_often(what, self._bad_keys.wait(owner))

    async def _note(self, request: HTTPConnection, owner: str) -> None:
        """Has a wrong key in the audit log, at most once a minute for an address: strangers write these
        rows."""
        secret = secret_of(request)
        if secret is None and cookie_of(request) is None:
            return
        if self._noted.take(owner) or self._all_noted.take(""):
            return
        prefix = keys.prefix_of(secret) if secret is not None and keys.is_shaped(secret) else ""
        what = "a wrong key" if secret is not None else "a login that is over or none"
        with suppress(StateError):
            await self.state.store.audit.note("key.refused", prefix, STRANGER, what, STRANGER)

    async def _together(self, request: HTTPConnection) -> Tenant:
        """As `tenant_of`; concurrent requests with the same key share a lookup."""
        _check_token(request)
        who = (secret_of(request), cookie_of(request), request.client and request.client.host)
        task = self._looked_up.get(who)
        if task is None:
            task = self._looked_up[who] = asyncio.create_task(tenant_of(request, self.state))
            task.add_done_callback(lambda _: self._looked_up.pop(who))
        return await asyncio.shield(task)


def secret_of(request: HTTPConnection) -> str | None:
    """The key in a request's headers, unchecked: a bearer's, or that of a `tinker` or an `anthropic`
    client."""
    scheme, given = get_authorization_scheme_param(request.headers.get("authorization"))
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    return keys.plain(given) or None


def cookie_name(request: HTTPConnection) -> str:
    """The name of a login's cookie, with the port that the browser asks: browsers send a host's cookies to
    all its ports, and a login at one server is not to end that at another."""
    port = _PORT.fullmatch(request.headers.get("host", ""))
    return COOKIE if port is None else f"{COOKIE}_{port[1]}"


def cookie_of(request: HTTPConnection) -> str | None:
    """The cookie of a login, unchecked; None where the request brings a key, which then counts."""
    return (secret_of(request) is None and request.cookies.get(cookie_name(request))) or None


def _check_token(request: HTTPConnection) -> None:
    """Raises ApiError 403 for a request that is to change something with a cookie alone: a browser sends that
    also where a page of another site asks."""
    cookie = cookie_of(request)
    if cookie is None or request.scope["method"] in _READS:
        return
    if not is_token(request.headers.get(TOKEN_HEADER, ""), cookie):
        message = (
            f"Requests that change something with the page's cookie need its token in '{TOKEN_HEADER}', "
            "as /web/api/login tells it; programs use an API key."
        )
        raise ApiError(403, message, code="token_missing")


def _needs_tenant(path: str) -> bool:
    return (path.startswith((*_API, _PAGE)) and path != _OPEN) or path.rstrip("/") in _INSIDE


async def tenant_of(request: HTTPConnection, state: State) -> Tenant:
    """The tenant of a request by its headers. Raises ApiError 401.

    While no key has ever existed and none is required, any key is ignored, as clients insist on sending one.
    Hosts and origins of web pages are checked before (`browsers.py`).
    """
    secret = secret_of(request)
    if secret is not None and (tenant := await state.store.tenants.of_key(secret)) is not None:
        return tenant
    cookie = cookie_of(request)
    if cookie is not None and (tenant := await state.store.logins.owner(cookie)) is not None:
        return tenant
    if await serves_without_keys(state):
        return LOCAL
    if cookie is not None:
        raise ApiError(401, "You are logged out: log in again with an API key.", code="logged_out")
    if secret is None:
        message = "You didn't provide an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        raise ApiError(401, message, code="missing_api_key")
    raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")


async def serves_without_keys(state: State) -> bool:
    """Tells whether every request belongs to the tenant `local`. A proxy's clients are elsewhere, also where
    the proxy itself is on this machine."""
    settings = state.settings
    is_alone = settings.is_loopback and not settings.trusted_proxies
    may_be_open = (is_alone or settings.allow_insecure) and not settings.require_keys
    return may_be_open and await state.store.tenants.is_open()


async def caller_of(
    request: Request,
    state: Shared,
    _: Annotated[object, Depends(_bearer)],  # for the OpenAPI document only
) -> Tenant:
    """FastAPI dependency: the tenant found by `Authentication`. Raises ApiError 401."""
    found: Tenant | None = getattr(request.state, "tenant", None)
    return await tenant_of(request, state) if found is None else found


Caller = Annotated[Tenant, Depends(caller_of)]
