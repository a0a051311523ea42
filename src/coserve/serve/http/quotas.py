"""Quotas of a tenant's requests and uploads, checked before a body is read. Runs after `Authentication`."""

import asyncio
import math
import shutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.core.size import show_size
from coserve.errors import CoserveError
from coserve.serve.errors import ApiError, Refusal
from coserve.serve.http.middleware import content_length
from coserve.serve.http.rates import TokenBuckets
from coserve.serve.store.files import FileStore

_COUNTED: Final = ("/v1/", "/api/v1/", "/tokenize", "/detokenize")  # beginnings of paths
_FORM_BYTES = 1024  # that a form has around its files
# Bytes of the disk that no upload gets: the database, checkpoints and results of accepted jobs go on.
DISK_RESERVE: Final = 256 << 20
_PIECE = 2**20  # bytes of a body of unknown length between two looks at its tenant's room


class RequestRate:
    """Answers 429 to tenants beyond their request rate, for any route."""

    def __init__(self, app: ASGIApp, rates: TokenBuckets) -> None:
        self.app, self._rates = app, rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = scope["type"] == "http" and scope["path"].startswith(_COUNTED)
        tenant = scope.get("state", {}).get("tenant") if counts else None
        if tenant is not None and (wait := self._rates.take(tenant.id)):
            refusal = too_often(f"You send more than {self._rates.most} requests in a minute", wait)
            await refusal.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)


class UploadRoom:
    """Answers 429 to uploads beyond their tenant's quota, and 507 to those beyond the disk's room, including
    uploads under way.

    A body of unknown length counts as the largest possible for later ones, and is checked again after each
    `_PIECE`. The quota is checked once more in the transaction that stores the file, which excludes races.
    """

    def __init__(
        self, app: ASGIApp, files: FileStore, paths: Collection[str], largest: int, folder: Path
    ) -> None:
        """`folder` is on the disk of uploads, `largest` is the most bytes of one."""
        self.app, self._files, self._paths, self._largest = app, files, frozenset(paths), largest
        self._folder = folder
        self._number: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._told: Counter[str] = Counter()  # of those that tell their length

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self.app(scope, receive, send)
            return
        tenant, told = scope["state"]["tenant"].id, max(content_length(scope) - _FORM_BYTES, 0)
        size, number = self._bytes[tenant] + told, self._number[tenant] + 1
        taken = told or self._largest
        self._bytes[tenant] += taken
        self._told[tenant] += told
        self._number[tenant] += 1
        try:
            try:
                await self._check(tenant, size, number)
            except ApiError as refusal:
                await refusal.response()(scope, receive, send)
                return
            await self.app(scope, receive if told else self._counted(receive, tenant, size, number), send)
        finally:
            self._bytes[tenant] -= taken
            self._told[tenant] -= told
            self._number[tenant] -= 1
            if not self._number[tenant]:
                del self._number[tenant], self._bytes[tenant], self._told[tenant]

    def _counted(self, receive: Receive, tenant: str, size: int, number: int) -> Receive:
        """`receive` for a body of unknown length, with `size` bytes under way before it: raises Refusal where
        the received bytes exceed the tenant's room."""
        seen, checked = -_FORM_BYTES, 0

        async def receive_counted() -> Message:
            nonlocal seen, checked
            received = await receive()
            seen += len(received.get("body", b""))
            if seen - checked >= _PIECE:
                checked = seen
                try:
                    await self._check(tenant, size + seen, number)
                except ApiError as refusal:
                    raise Refusal(refusal) from refusal
            return received

        return receive_counted

    async def _check(self, tenant: str, size: int, number: int) -> None:
        """Raises ApiError where there is no room for `size` more bytes in `number` files of a tenant. The
        disk check counts bytes written by other uploads twice, which refuses slightly early."""
        others = sum(self._told.values()) - self._told[tenant]
        usage = await asyncio.to_thread(shutil.disk_usage, self._folder)
        if size + others > usage.free - DISK_RESERVE:
            free = show_size(max(usage.free - DISK_RESERVE, 0))
            raise ApiError(
                507,
                f"The server's disk has no room for this upload: {free} are free for files, beside "
                f"{show_size(DISK_RESERVE)} that are kept for jobs. Delete files or adapters that are not "
                "needed, or ask the server's operator for room.",
                code="disk_full",
                headers={"x-should-retry": "false"},
            )
        try:
            await self._files.check_room(tenant, size, number)
        except CoserveError as error:
            raise ApiError.of(error) from error


def too_often(what: str, wait: float) -> ApiError:
    """The 429 of a request that may be retried in `wait` seconds."""
    seconds = max(math.ceil(wait), 1)
    message = f"{what}: please try again in {seconds} second{'' if seconds == 1 else 's'}."
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})
