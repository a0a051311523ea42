"""Connections: limits on their number and their time, and strict parsing of HTTP.

uvicorn limits the time between two requests, but not within one: not for headers, a body, or a client that
does not read. Its parser, h11, accepts some messages that proxies may parse differently.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from coserve.core.owners import LOOPBACK, owner_of
from coserve.serve.errors import OPENAI, ApiError, ErrorShape, openai_shape
from coserve.serve.http.access import log_refused
from coserve.serve.http.middleware import new_request_id
from coserve.serve.http.proxies import Network, address_in, is_trusted
from coserve.serve.http.shedding import LoadShedder, path_of

_LEAST_RATE: Final = 1024  # bytes per second of a body on its way in, or of an answer on its way out
_MOST_UNREAD: Final = 2**20  # bytes of an unwanted body that are read, so that the client reads the answer
_SETTLED: Final = 1.0  # seconds without a request, after which a connection may have to go for a new one
_LOOPBACK_SHARE: Final = 4  # this machine may have this many times what another address may
_AMBIGUOUS: Final = re.compile(rb"(?<!\r)\n|\n[ \t]")  # lines without a carriage return, folded lines


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on the number of connections, and on the time that each may take."""

    most: int = 1024
    most_address: int = 256  # of one address that is not this machine's
    stall_seconds: float = 15.0  # for all headers; and without 1 KiB/s of a body, or of an answer being read
    idle_seconds: float = 75.0  # between two requests
    proxies: tuple[Network, ...] = ()  # that may have all connections


class Connections:
    """All connections of one listener. For one event loop.

    Without a `shedder` all requests reach the application. `shape_of` has the form of errors for a path. With
    `logs_refused` the access log has what is refused here.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        shedder: LoadShedder | None = None,
        shape_of: Callable[[str], ErrorShape] = openai_shape,
        logs_refused: bool = False,
    ) -> None:
        self.limits, self.shedder, self.shape_of = limits, shedder, shape_of
        self.logs_refused = logs_refused
        self._open: dict[HttpConnection, str] = {}  # with their owners, in order of arrival
        self._count: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: "HttpConnection", host: str | None) -> bool:
        """Adds a connection, closing an idle one if there is no room; False if there is still none."""
        owner = owner_of(host)
        share = self.limits.most_address * (_LOOPBACK_SHARE if owner == LOOPBACK else 1)
        address = address_in(host or "") if self.limits.proxies else None
        if address is not None and is_trusted(address, self.limits.proxies):
            share = self.limits.most
        if self._count[owner] >= share and not self._make_room(owner):
            return False
        if len(self._open) >= self.limits.most and not self._make_room(None):
            return False
        self._open[connection] = owner
        self._count[owner] += 1
        return True

    def leave(self, connection: "HttpConnection") -> None:
        """Removes a connection; unknown ones are ignored."""
        owner = self._open.pop(connection, None)
        if owner is not None:
            self._count[owner] -= 1
            if not self._count[owner]:
                del self._count[owner]

    async def watch(self) -> None:
        """Closes connections that exceed their time; never returns."""
        while True:
            await asyncio.sleep(min(1.0, self.limits.stall_seconds / 4))
            now = monotonic()
            for connection in list(self._open):
                connection.check(now)

    def _make_room(self, owner: str | None) -> bool:
        """Closes the longest idle connection, of `owner` if given."""
        long_ago = monotonic() - _SETTLED
        idle = [
            connection
            for connection, whose in self._open.items()
            if owner in (None, whose) and connection.is_idle and connection.rests <= long_ago
        ]
        if not idle:
            return False
        oldest = min(idle, key=lambda connection: connection.rests)
        self.leave(oldest)
        oldest.transport.abort()
        return True


class StrictHttp(h11.Connection):
    """h11 that refuses ambiguous requests (RFC 9112, 6.1 and 11.2).

    `on_request` is called with each request and the received bytes of its body; its errors propagate.
    """

    def __init__(self, most_head: int, on_request: Callable[[h11.Request, int], None]) -> None:
        super().__init__(h11.SERVER, most_head)
        self._on_request = on_request

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            head, _, _ = self.trailing_data[0].partition(b"\r\n\r\n")
            if _AMBIGUOUS.search(head):
                raise h11.RemoteProtocolError(
                    "a line that ends without a carriage return, or goes on in the next"
                )
        event = super().next_event()
        if isinstance(event, h11.Request):
            if event.http_version not in (b"1.0", b"1.1"):
                raise h11.RemoteProtocolError("another version of HTTP")
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version == b"1.0"):
                raise h11.RemoteProtocolError("a body of two lengths")
            self._on_request(event, len(self.trailing_data[0]))
        return event


class HttpConnection(H11Protocol):
    """A connection of uvicorn's with limits."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.conn = StrictHttp(self.config.h11_max_incomplete_event_size or 65536, self._enter)
        # When it came, or its last answer was complete. Bytes of headers that have not come as a whole, or
        # of a request that has its answer already, change nothing: trickling must not hold a place.
        self.rests = monotonic()
        self._all = connections
        self._stall = connections.limits.stall_seconds
        self._phase: tuple[str, object] | None = None  # what the server waits for, and the request
        self._since, self._bytes = self.rests, 0  # of the phase: its last look at the rate, bytes since
        self._unsent: tuple[float, int] | None = None  # time and bytes at the last check
        self._unread = 0  # bytes of a body whose request has its answer
        self._counted: bytes | None = None  # the argument for the shedder's `leave`
        self._shape = OPENAI  # of the last request's errors
        self._asked = "", ""  # method and path of the request that is under way, as far as they are known

    @property
    def is_idle(self) -> bool:
        """Tells whether no request is read or answered."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport = cast(asyncio.Transport, _OpenTransport(transport))
        self.transport = transport
        peer = transport.get_extra_info("peername")
        if self._all.enter(self, peer[0] if isinstance(peer, tuple) else None):
            super().connection_made(transport)
        else:
            self._end(503, "The server has too many connections; please try again later.")

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self)
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        if self.cycle is not None and self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY:
            self._unread += len(data)
            if self._unread > _MOST_UNREAD:
                self.transport.abort()
                return
        super().data_received(data)

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except ApiError as refusal:
            self._refuse(refusal)
            self.transport.close()

    def on_response_complete(self) -> None:
        self.rests, self._unread, self._asked = monotonic(), 0, ("", "")
        self._leave()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP with an error in the usual format."""
        self._end(400, "The request is not valid HTTP.")

    def check(self, now: float) -> None:
        """Closes the connection if it has exceeded a time limit. `now` is `time.monotonic`."""
        if self._reads_too_slowly(now):
            self.transport.abort()
            return
        phase = self._waits_for()
        if phase != self._phase:
            self._phase, self._since, self._bytes = phase, now, 0
        if phase is None or now - self._since < self._stall or self.transport.is_closing():
            return
        enough = self._bytes >= _LEAST_RATE * self._stall
        if phase[0] == "body" and (enough or self.flow.read_paused):  # paused: the server is slow
            self._since, self._bytes = now, 0
        else:
            told = f"The request took longer than {self._stall:g} seconds to come."
            self._end(408, told, now - self._since)

    def _enter(self, request: h11.Request, arrived: int) -> None:
        path = path_of(request).decode("latin-1")
        self._shape, self._asked = self._all.shape_of(path), (request.method.decode("latin-1"), path)
        if self._all.shedder is not None:
            self._counted = self._all.shedder.enter(request, arrived)

    def _leave(self) -> None:
        if self._all.shedder is not None and self._counted is not None:
            self._all.shedder.leave(self._counted)
            self._counted = None

    def _waits_for(self) -> tuple[str, object] | None:
        if self.conn.their_state is h11.SEND_BODY:
            return "body", self.cycle
        has_begun = self.cycle is None or bool(self.conn.trailing_data[0])
        return ("headers", self.cycle) if self.conn.their_state is h11.IDLE and has_begun else None

    def _reads_too_slowly(self, now: float) -> bool:
        """Tells whether the client reads sent data slower than the minimum rate."""
        left = self.transport.get_write_buffer_size()
        is_stuck = self.transport.is_closing() or self.is_idle or self.flow.write_paused
        if not left or not is_stuck:
            self._unsent = None
            return False
        if self._unsent is None:
            self._unsent = now, left
        since, before = self._unsent
        if now - since < self._stall:
            return False
        self._unsent = now, left
        return before - left < _LEAST_RATE * self._stall

    def _end(self, status: int, message: str, seconds: float = 0.0) -> None:
        """Sends an error unless another answer has begun or there was no request, and closes the
        connection."""
        cycle = self.cycle
        # A request that was answered before its body had come gets no second answer.
        is_open = cycle is not None and (
            not cycle.response_complete or self.conn.their_state is h11.SEND_BODY
        )
        has_begun = is_open and cycle.response_started
        has_asked = cycle is not None or self._bytes > 0 or status == 503
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if has_asked and not has_begun:
            self._refuse(ApiError(status, message), seconds)
        self.transport.close()

    def _refuse(self, error: ApiError, seconds: float = 0.0) -> None:
        """Sends an error of this connection's own. A request that has reached the application is in the
        access log anyway."""
        id = new_request_id()
        self.transport.write(_written(error, self._shape, id))
        if self._all.logs_refused and (self.cycle is None or self.cycle.response_complete):
            peer = self.transport.get_extra_info("peername")
            address = str(peer[0]) if isinstance(peer, tuple) else ""
            log_refused(id, address, *self._asked, error.status, seconds)


class _OpenTransport:
    """A transport that drops what is written once it is closing. asyncio's own logs a line for each write to
    a client that has gone, until the loop has got to say so."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


def _written(error: ApiError, shape: ErrorShape, id: str) -> bytes:
    body = shape.written(error, id)
    headers = {
        **error.headers, "Content-Type": "application/json", "Content-Length": str(len(body)),
        "x-request-id": id, shape.id_header: id, "Connection": "close",
    }  # fmt: skip
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
