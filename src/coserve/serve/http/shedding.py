"""Load shedding: requests beyond what may run and wait are refused at once, before those that came before
them are prepared.

Preparing a request (decoding, templates, tokens) takes the event loop 1 to 3 ms, and refusing one as soon
as its headers are read 0.2 ms. Where 640 come together, refusals do not wait for the 270 that are accepted.
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
    """Admission check that a connection makes from a request's headers, before the application sees it.

    Requests for text are counted by their `Authorization` header: beyond the number that one tenant may have
    they are refused, and no key is looked up for that. Tenants with several keys, and totals, are left to
    `ConcurrencyLimit`. For one event loop.
    """

    def __init__(self, queue: FairQueue, paths: Collection[str]) -> None:
        self._queue, self._paths = queue, frozenset(path.encode() for path in paths)
        self._in_flight: Counter[bytes] = Counter()

    def enter(self, request: h11.Request, arrived: int) -> bytes | None:
        """Counts a request of whose body `arrived` bytes have come. Returns the argument for `leave`, None
        for a request that is not counted. Raises ApiError 429 where it could not even wait.

        A request whose body has not come as a whole is never refused here: a client that is still sending
        would not read the refusal.
        """
        if request.target not in self._paths:
            return None
        headers = dict(request.headers)
        who = headers.get(b"authorization", b"")
        is_whole = (
            arrived >= int(headers.get(b"content-length", b"0")) and b"transfer-encoding" not in headers
        )
        if is_whole and not _APPLICATIONS & headers.keys():
            self._queue.check(0, self._in_flight[who])
        self._in_flight[who] += 1
        return who

    def leave(self, who: bytes) -> None:
        """The answer to a request that was counted has ended, or its connection has."""
        self._in_flight[who] -= 1
        if not self._in_flight[who]:
            del self._in_flight[who]


class ConcurrencyLimit:
    """Answers 429 to a request for text while as many are under way as may run and wait: before its body is
    read. Those that are accepted are prepared one per round of the event loop, tenants in turn.

    Stands behind `Authentication`.
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
    """Lets one caller go on per round of the event loop, the tenants' first ones in turn. For one event loop.

    Whatever else is ready in a round, such as refusals and tokens of streams, comes between two of them.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_taken = False  # in this round

    async def turn(self, tenant: str) -> None:
        """Returns when it is the caller's turn: at once where no caller had one in this round."""
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
