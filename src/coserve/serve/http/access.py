"""The access log: a line for each request, without bodies, queries and headers."""

import logging
from time import monotonic
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.core.masking import masked
from coserve.wire.logs import CONTEXT, WorkContext, context

log = logging.getLogger("coserve.access")
_TOLD = 256  # characters of a path
_GONE = 499  # the status that proxies log for a client that left


class AccessLog:
    """Logs each request once it is over: method, path, status, seconds, tenant, tokens, and the version that
    answered. It comes after `RequestIds`, which has made the request's context."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = monotonic(), _GONE

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        except Exception:
            status = 500 if status == _GONE else status
            raise
        finally:
            _say(scope["method"], scope["path"], status, monotonic() - began)


def log_refused(request_id: str, address: str, method: str, path: str, status: int, seconds: float) -> None:
    """Logs a request that a connection has refused, before the application. What is not known of one that is
    no HTTP is `-`."""
    before = CONTEXT.set(WorkContext(request_id, address=address))
    try:
        _say(method or "-", path or "-", status, seconds)
    finally:
        CONTEXT.reset(before)


def _say(method: str, path: str, status: int, seconds: float) -> None:
    work = context()
    fields: dict[str, Any] = {
        "method": method,
        "path": masked(path if len(path) <= _TOLD else path[:_TOLD] + "…"),
        "status": status,
        "seconds": round(seconds, 6),
        "address": work.address,
        "prompt_tokens": work.prompt_tokens,
        "cached_tokens": work.cached_tokens,
        "completion_tokens": work.completion_tokens,
        "version": work.version,
    }
    fields = {name: value for name, value in fields.items() if value != ""}
    line = "{method} {path!r} {status} {seconds:.3f} s".format(**fields)
    more = {"request": work.request_id, "answer": work.answer, "tenant": work.tenant, "version": work.version}
    if work.prompt_tokens:
        more["tokens"] = f"{work.prompt_tokens}+{work.completion_tokens}"
    told = " ".join(f"{name}={value}" for name, value in more.items() if value)
    log.info("%s %s", line, told, extra={"fields": fields})
