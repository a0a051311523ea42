"""`/`, the page; its files below `/web/`; and logins of browsers.

A login is a cookie that scripts cannot read. It stands for the key that it was made with at every endpoint
that takes keys (`http/auth.py`).
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from coserve.serve.errors import ApiError, error_responses, not_found
from coserve.serve.http.auth import Caller, cookie_name, cookie_of, secret_of
from coserve.serve.http.streams import EVENT_BEGIN, EVENT_END, EventStream
from coserve.serve.state import Shared
from coserve.serve.store.logins import LOGIN_SECONDS, token_of
from coserve.serve.telemetry import MOST_VIEWERS
from coserve.serve.web.files import INDEX, PageFile, page_files

router = APIRouter(tags=["Page"])
LOGIN: Final = "/web/api/login"
LIVE: Final = "/web/api/live"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Vary": "Accept-Encoding",
}
_FOREVER: Final = "public, max-age=31536000, immutable"


class Login(BaseModel):
    """The caller. `token` is what its cookie needs in `x-coserve-token` to change something; None where no
    cookie is used."""

    object: Literal["login"] = "login"
    tenant: str
    by: Literal["cookie", "key", "loopback"]
    token: str | None = None


@router.get(LOGIN, responses=error_responses(), summary="Who the caller is")
async def whoami(request: Request, caller: Caller) -> Login:
    """Tells the tenant, and how it was found: by a cookie, by a key, or because the server has no keys and
    answers everybody on this machine."""
    cookie = cookie_of(request)
    if secret_of(request) is not None:
        return Login(tenant=caller.name, by="key")
    if cookie is None:
        return Login(tenant=caller.name, by="loopback")
    return Login(tenant=caller.name, by="cookie", token=token_of(cookie))


@router.post(LOGIN, responses=error_responses(400), summary="Log a browser in")
async def login(request: Request, response: Response, caller: Caller, state: Shared) -> Login:
    """Exchanges the API key of this request's headers for a cookie, which lasts for a week or until the key
    is revoked."""
    secret = secret_of(request)
    if secret is None:
        raise ApiError(400, "Log in with an API key, as 'Authorization: Bearer KEY'.")
    cookie = await state.store.logins.begin(secret)
    if cookie is None:  # a server without keys ignores those that are sent
        return Login(tenant=caller.name, by="loopback")
    name, is_encrypted = cookie_name(request), _is_encrypted(request)
    response.set_cookie(
        name, cookie, max_age=LOGIN_SECONDS, httponly=True, samesite="strict", secure=is_encrypted
    )
    return Login(tenant=caller.name, by="cookie", token=token_of(cookie))


@router.delete(LOGIN, responses=error_responses(), summary="Log a browser out", status_code=204)
async def logout(request: Request, response: Response, caller: Caller, state: Shared) -> None:
    """Ends the login of this request's cookie."""
    cookie = cookie_of(request)
    if cookie is not None:
        await state.store.logins.end(cookie)
    name, is_encrypted = cookie_name(request), _is_encrypted(request)
    response.delete_cookie(name, httponly=True, samesite="strict", secure=is_encrypted)


@router.get(LIVE, include_in_schema=False)
async def live(caller: Caller, state: Shared) -> Response:
    """Server-sent events, one a second: the figures of all, and those of the caller's own models and jobs.
    The first event has the last ten minutes."""
    if state.telemetry.is_full(caller):
        message = f"{MOST_VIEWERS} pages watch for you already: close one of them."
        raise ApiError(429, message, code="too_many_viewers", headers={"Retry-After": "5"})
    source = state.telemetry.follow(caller)
    return EventStream(_events(source), source)


async def _events(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async for message in source:
        yield EVENT_BEGIN + message + EVENT_END


def _is_encrypted(request: Request) -> bool:
    """Tells whether the browser's connection has TLS. Behind a proxy that ends it, the page's own origin,
    which browsers send with such requests, tells."""
    return request.url.scheme == "https" or request.headers.get("origin", "").startswith("https://")


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """The page, which shows and does what its visitor's key allows."""
    files = await asyncio.to_thread(page_files)
    return _reply(request, files.files[INDEX], "no-cache")


@router.head("/web/{version}/{name:path}", include_in_schema=False)
@router.get("/web/{version}/{name:path}", include_in_schema=False)
async def file(request: Request, version: str, name: str) -> Response:
    """A file of the page. Those of another version are this one's, which an older page that is still open
    may import late; browsers ask for these again."""
    files = await asyncio.to_thread(page_files)
    if (found := files.files.get(name)) is None:
        raise not_found(f"The page has no file {name!r}.")
    return _reply(request, found, _FOREVER if version == files.version else "no-cache")


def _reply(request: Request, file: PageFile, caching: str) -> Response:
    headers = {**_HEADERS, "ETag": file.tag, "Cache-Control": caching}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    headers["Content-Type"] = file.content_type
    given = request.headers.get("accept-encoding", "").replace(" ", "").split(",")
    accepted = {name for name, _, quality in (one.partition(";") for one in given) if quality != "q=0"}
    for name, encoded in file.encoded.items():
        if name in accepted:
            return Response(encoded, headers={**headers, "Content-Encoding": name})
    return Response(file.plain, headers=headers)
