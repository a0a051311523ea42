"""Load shedding: requests beyond the queue's room are refused at once, before accepted ones are prepared.

Preparing a request (decoding, templates, tokens) takes 1 to 3 ms of the event loop, refusing one by its
headers 0.2 ms. So of 640 concurrent requests the refused ones do not wait for the 270 accepted.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from typing import Final

import h11
from starlette.types import ASGIApp, Receive, Scope, Send

from coserve.serve.answering.fair import FairQueue
from coserve.serve.errors import ApiError

_APPLICATIONS: Final = frozenset({b"origin", b"x-request-id"})  # the application's answers use these


class LoadShedder:
    """Admission check of a connection by a request's headers, before the application.

    Counts requests for text by the header that has their key, without looking it up, and refuses those beyond
    the limit of one tenant. `ConcurrencyLimit` handles tenants with several keys, and totals. For one event
    loop.
    """

    def __init__(self, queue: FairQueue, paths: Collection[str]) -> None:
        self._queue, self._paths = queue, frozenset(path.encode() for path in paths)
        self._in_flight: Counter[bytes] = Counter()

    def enter(self, request: h11.Request, arrived: int) -> bytes | None:
        """Counts a request with `arrived` bytes of its body received. Returns the argument for `leave`, None
        for a request that is not counted. Raises ApiError 429 where the queue is full.

        A request with an incomplete body is never refused here: a client that is still sending would not read
        the response.
        """
        if path_of(request) not in self._paths:
            return None
        headers = dict(request.headers)
        who = headers.get(b"authorization") or headers.get(b"x-api-key", b"") or headers.get(b"cookie", b"")
        is_whole = (
            arrived >= int(headers.get(b"content-length", b"0")) and b"transfer-encoding" not in headers
        )
        if is_whole and not _APPLICATIONS & headers.keys():
            self._queue.check(0, self._in_flight[who])
        self._in_flight[who] += 1
        return who

    def leave(self, who: bytes) -> None:
        """Uncounts a request whose answer or connection has ended."""
        self._in_flight[who] -= 1
        if not self._in_flight[who]:
            del self._in_flight[who]


def path_of(request: h11.Request) -> bytes:
    """The path of a request, without its query."""
    return request.target.partition(b"?")[0]


class ConcurrencyLimit:
    """Answers 429 to requests for text while the queue is full, before their bodies are read. Accepted ones
    are prepared one per round of the event loop, tenants in turn.

    Runs after `Authentication`.
    """

    def __init__(self, app: ASGIApp, queue: FairQueue, paths: Collection[str]) -> None:
        self.app, self._queue, self._paths = app, queue, frozenset(paths)
        self._under_way: Counter[str] = Counter()
        self._rounds = LoopTurns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self.app(scope, receive, send)
            return
        tenant = scope["state"]["tenant"].id
        try:
            self._queue.check(self._under_way.total(), self._under_way[tenant])
        except ApiError as refusal:
            await refusal.response()(scope, receive, send)
            return
        self._under_way[tenant] += 1
        try:
            await self._rounds.turn(tenant)
            await self.app(scope, receive, send)
        finally:
            self._under_way[tenant] -= 1
            if not self._under_way[tenant]:
                del self._under_way[tenant]


class LoopTurns:
    """Admits one caller per round of the event loop, tenants in turn. For one event loop.

    Other ready work, such as refusals and tokens of streams, runs between two of them.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_taken = False  # in this round

    async def turn(self, tenant: str) -> None:
        """Waits for the caller's turn; returns at once if no caller had one in this round."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            self._waiting.setdefault(tenant, deque()).append(turn)
            await turn
        else:
            self._is_taken = True
            loop.call_soon(self._next)

    def _next(self) -> None:
        while self._waiting:
            tenant, line = self._waiting.popitem(last=False)
            turn = line.popleft()
            if line:
                self._waiting[tenant] = line
            if not turn.done():  # else its caller was cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False
