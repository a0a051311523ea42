"""What one tenant may ask for and bring in, before a body is read. Stands behind `Authentication`."""

import math
from collections import Counter
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.errors import CoserveError
from coserve.serve.errors import ApiError, Refusal
from coserve.serve.http.middleware import content_length
from coserve.serve.http.rates import Rates
from coserve.serve.store.files import FileStore

_FORM_BYTES = 1024  # that a form has around its files
_PIECE = 2**20  # bytes of a body of unknown length between two looks at its tenant's room


class RequestRate:
    """Answers 429 to a tenant that asks more often than it may, whatever for."""

    def __init__(self, app: ASGIApp, rates: Rates, most: int) -> None:
        self.app, self._rates, self._most = app, rates, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = scope["type"] == "http" and scope["path"].startswith("/v1/")
        if counts and (wait := self._rates.take(scope["state"]["tenant"].id)):
            refusal = too_often(f"You send more than {self._most} requests in a minute", wait)
            await refusal.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)


class UploadRoom:
    """Answers 429 to an upload that its tenant has no room for, those under way counted.

    A body that does not tell its length counts as the largest for those that come after it, and is looked at
    again with each `_PIECE` of it that has come. What is really kept is checked once more when it is: a
    transaction cannot be raced past.
    """

    def __init__(self, app: ASGIApp, files: FileStore, paths: Collection[str], largest: int) -> None:
        self.app, self._files, self._paths, self._largest = app, files, frozenset(paths), largest
        self._number: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self.app(scope, receive, send)
            return
        tenant, told = scope["state"]["tenant"].id, max(content_length(scope) - _FORM_BYTES, 0)
        size, number = self._bytes[tenant] + told, self._number[tenant] + 1
        taken = told or self._largest
        self._bytes[tenant] += taken
        self._number[tenant] += 1
        try:
            try:
                await self._files.check_room(tenant, size, number)
            except CoserveError as error:
                await ApiError.of(error).response()(scope, receive, send)
                return
            await self.app(scope, receive if told else self._counted(receive, tenant, size, number), send)
        finally:
            self._bytes[tenant] -= taken
            self._number[tenant] -= 1
            if not self._number[tenant]:
                del self._number[tenant], self._bytes[tenant]

    def _counted(self, receive: Receive, tenant: str, size: int, number: int) -> Receive:
        """`receive` for a body of unknown length, behind `size` bytes under way: raises Refusal where the
        tenant has no room for what has come of it."""
        seen, checked = -_FORM_BYTES, 0

        async def receive_counted() -> Message:
            nonlocal seen, checked
            received = await receive()
            seen += len(received.get("body", b""))
            if seen - checked >= _PIECE:
                checked = seen
                try:
                    await self._files.check_room(tenant, size + seen, number)
                except CoserveError as error:
                    raise Refusal(ApiError.of(error)) from error
            return received

        return receive_counted


def too_often(what: str, wait: float) -> ApiError:
    """The answer to who may do it again in `wait` seconds."""
    seconds = max(math.ceil(wait), 1)
    message = f"{what}: please try again in {seconds} second{'' if seconds == 1 else 's'}."
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})
