"""Protection against other sites' web pages: trusted host names and allowed origins.

Any page in a browser on this machine can reach a loopback server. Two headers identify it, and pages cannot
forge them: `Host` is the name in the requested address, which exposes names that were pointed at 127.0.0.1
(DNS rebinding); `Origin` is the page's own site.
"""

import functools
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from coserve.serve.errors import ApiError
from coserve.serve.settings import ANY, ServerSettings, is_loopback

_HOST: Final = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d{1,5})?")  # name or address, perhaps a port
_EXPOSED: Final = ("x-request-id", "x-should-retry", "Retry-After")  # headers that pages may read
_PREFLIGHT_SECONDS: Final = "600"


class TrustedHosts:
    """Answers 403 to requests for a host name that is not this server's, while it serves without keys.

    Where keys are required other sites' pages have none, and proxies may use any name: names are then checked
    only if the settings list some.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, is_open: Callable[[], Awaitable[bool]]
    ) -> None:
        self.app, self._settings, self._is_open = app, settings, is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).getlist("host")
            foreign = next((host for host in given if not is_own_host(host, self._settings)), None)
            if foreign is not None and (self._settings.allowed_hosts or await self._is_open()):
                await _refused_host(foreign).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


class AllowedOrigins:
    """Serves pages of allowed origins and the server's own; refuses others with the reason.

    Preflights are answered for any origin, without a key: only then can a page read the refusal of the
    request itself, which is made before any work.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self.app, self._allowed = app, frozenset(allowed)
        self._cors = CORSMiddleware(
            app,
            allow_origins=tuple(allowed),
            allow_methods=("*",),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=_EXPOSED,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None or _is_same_site(origin, headers.get("host", "")):
            await self.app(scope, receive, send)
        elif ANY in self._allowed or origin in self._allowed:
            await self._cors(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(origin, headers)(scope, receive, send)
        else:
            await _refused_origin(origin)(scope, receive, send)


def is_own_host(host: str, settings: ServerSettings) -> bool:
    """Tells whether a `Host` header names this server: loopback, the bound address, this machine, an allowed
    host.

    Where the server listens on all addresses, any IP address is accepted: a page cannot have a foreign one
    that leads here.
    """
    matched = _HOST.fullmatch(host.strip())
    if matched is None:
        return False
    name = matched[1].strip("[]").lower().removesuffix(".")
    if is_loopback(name) or name == settings.host.strip("[]").lower() or name in _names_of_this_machine():
        return True
    bound = _address(settings.host.strip("[]"))
    if bound is not None and bound.is_unspecified and _address(name) is not None:
        return True
    return any(_fits(name, allowed.lower()) for allowed in settings.allowed_hosts)


def _fits(name: str, allowed: str) -> bool:
    """Tells whether a name fits an allowed host: `*` fits all, `*.example.org` all names below
    example.org."""
    return allowed in (ANY, name) or (allowed.startswith("*.") and name.endswith(allowed[1:]))


@functools.cache
def _names_of_this_machine() -> frozenset[str]:
    name = socket.gethostname().lower()
    return frozenset({name, f"{name}.local"}) if name else frozenset()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a name spells; None for other names."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_same_site(origin: str, host: str) -> bool:
    """Tells whether a page is from this server. Schemes may differ, as a proxy may terminate TLS."""
    _, found, site = origin.partition("://")
    return bool(found) and site.lower() == host.strip().lower()


def _preflight(origin: str, headers: Headers) -> Response:
    answer = Response(status_code=204, headers=_for_reading(origin))
    answer.headers["Access-Control-Allow-Methods"] = headers["access-control-request-method"]
    answer.headers["Access-Control-Max-Age"] = _PREFLIGHT_SECONDS
    if asked := headers.get("access-control-request-headers"):
        answer.headers["Access-Control-Allow-Headers"] = asked
    return answer


def _refused_origin(origin: str) -> Response:
    message = (
        f"Pages of the origin {origin} are not allowed: whoever runs this server adds it with "
        f"--cors-origin {origin}, or cors_origins in coserve.toml."
    )
    return ApiError(403, message, code="origin_not_allowed", headers=_for_reading(origin)).response()


def _for_reading(origin: str) -> dict[str, str]:
    return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}


def _refused_host(host: str) -> ApiError:
    matched = _HOST.fullmatch(host)
    name = host if matched is None else matched[1]
    message = (
        f"This server does not answer to the host {host!r}: if that is its name, whoever runs it adds it "
        f"with --allowed-host {name}, or allowed_hosts in coserve.toml."
    )
    return ApiError(403, message, code="host_not_allowed")
