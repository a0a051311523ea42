"""Streams, and cancellation of work when the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from time import monotonic
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coserve.serve.tasks import cancel

T = TypeVar("T")
_TURN_SECONDS: Final = 0.005


class ClientGone(Exception):
    """The client closed its connection; the work for it has been cancelled."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. Cancels it and raises ClientGone once the client disconnects.

    The whole body must have been read, so that the next message is the disconnect.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await cancel(working, leaving)


class EventStream(Response):
    """Server-sent events, one for each item of `events`, sent as soon as the item arrives.

    `source`, the origin of the events, is closed at the end, so that all work ends when the client
    disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Any, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._source = events, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source):
            with suppress(ClientGone):
                await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Pause:
    """Lets the rest of the loop run once its caller has had a turn of some milliseconds: a coroutine whose
    data is there does not wait, and so would not."""

    def __init__(self, seconds: float = _TURN_SECONDS) -> None:
        self._seconds, self._since = seconds, monotonic()

    async def __call__(self) -> None:
        if monotonic() - self._since > self._seconds:
            await asyncio.sleep(0)
            self._since = monotonic()


EVENT_BEGIN: Final = b"data: "  # of a server-sent event
EVENT_END: Final = b"\n\n"
DONE: Final = EVENT_BEGIN + b"[DONE]" + EVENT_END


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
