"""Many streamed completions at once, by clients with little work of their own.

Pieces are stamped on arrival and parsed when all streams are over, so that little time is taken from the
server on a small machine. A broken connection is made again with the same request, as clients do.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec

from coserve.errors import ServerError, Unreachable

_PIECE = 2**16  # bytes read at once
_RETRY = 0.05  # seconds
_AWAY = (429, 502, 503)  # asked again, as OpenAI's client does
_END = b"\r\n0\r\n\r\n"  # the last chunk; no event of a stream holds a carriage return
_ANSWERED = b"HTTP/1.1 200 "


class StreamRequest(msgspec.Struct, frozen=True):
    """One completion of exactly `answer` tokens; `at` is seconds after the load begins. Greedy at temperature
    0. `tells_tokens` has the server say their ids, each in a chunk of its own. `model` is whom to ask, the
    load's where it is empty; `tier` is the service tier."""

    prompt: tuple[int, ...]
    answer: int
    at: float = 0.0
    temperature: float = 0.0
    seed: int = 0
    tells_tokens: bool = False
    model: str = ""
    tier: str = "default"

    def body(self, model: str) -> bytes:
        """Body of the request to /v1/completions."""
        fields: dict[str, Any] = {
            "model": self.model or model,
            "service_tier": self.tier,
            "prompt": self.prompt,
            "max_tokens": self.answer,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(fields | ({"return_token_ids": True} if self.tells_tokens else {})).encode()


class StreamResult(msgspec.Struct):
    """Result of one stream; times are of `time.monotonic`, which all processes of a machine share.

    `asked` is when it was due. `tokens` and `stamps` go by position: a token that is sent again after a
    broken connection counts when it first came; `agrees` is False where it differs from the first. `attempts`
    is more than one after a break.
    """

    asked: float
    first_byte: float = 0.0
    ended: float = 0.0
    written: int = 0  # tokens, by the server's own count
    chunks: int = 0
    attempts: int = 0
    agrees: bool = True
    tokens: list[int] = []
    stamps: list[float] = []

    @property
    def longest_gap(self) -> float:
        """Seconds between two tokens, at most."""
        return max((after - before for before, after in pairwise(self.stamps)), default=0.0)

    def is_live(self, at: float) -> bool:
        """Tells whether the stream had begun and not ended at this time."""
        return self.asked <= at < self.ended


class Streams:
    """Runs requests against a server and keeps what arrives; `on_piece` is called for each piece.

    `patience` is how many seconds a stream may be without its server.
    """

    def __init__(self, url: str, model: str, on_piece: Callable[[], None], patience: float = 120.0) -> None:
        self._host, self._port = _address(url)
        self._model, self._on_piece, self._patience = model, on_piece, patience
        self.processor_seconds = 0.0  # that the last run took, without reading what had come

    async def run(self, asks: Sequence[StreamRequest]) -> list[StreamResult]:
        """Runs all requests, each at its time. Raises ServerError where the server refuses one, and
        Unreachable."""
        began, used = time.monotonic(), time.process_time()
        attempts = await asyncio.gather(*(self._one(ask, began) for ask in asks))
        self.processor_seconds = time.process_time() - used
        return [_heard(one) for one in attempts]

    async def _one(self, ask: StreamRequest, began: float) -> list["_Attempt"]:
        due = began + ask.at
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        request = _Request(ask.body(self._model), self._host)
        attempts: list[_Attempt] = []
        alive = time.monotonic()
        while True:
            attempt = _Attempt(request, due)
            await self._try(attempt)
            attempts.append(attempt)
            if attempt.is_whole:
                return attempts
            if attempt.pieces:
                attempt.read()
                if attempt.status not in (None, 200, *_AWAY):
                    raise ServerError(f"the server answered with status {attempt.status}: {attempt.error}")
                alive = time.monotonic() if attempt.tokens else alive
            if time.monotonic() - alive > self._patience:
                raise Unreachable(f"a stream had no server for {self._patience:g} s")
            await asyncio.sleep(_RETRY)

    async def _try(self, attempt: "_Attempt") -> None:
        """Sends the request and reads until the end of the answer or of the connection."""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            return
        try:
            writer.write(attempt.request.data)
            tail = b""
            while data := await reader.read(_PIECE):
                attempt.pieces.append((time.monotonic(), data))
                self._on_piece()
                tail = (tail + data)[-len(_END) :]
                if tail == _END:
                    attempt.is_whole = attempt.begins_with(_ANSWERED)
                    return
        except OSError:
            return
        finally:
            writer.close()


class _Request:
    """The bytes of a request, and the parser of its answer's."""

    def __init__(self, body: bytes, host: str) -> None:
        self._body = body
        self._headers = [
            ("Host", host),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        self.data = self._send(h11.Connection(h11.CLIENT))

    def parser(self) -> h11.Connection:
        """A connection that has just sent it."""
        connection = h11.Connection(h11.CLIENT)
        self._send(connection)
        return connection

    def _send(self, connection: h11.Connection) -> bytes:
        request = h11.Request(method="POST", target="/v1/completions", headers=self._headers)
        parts = [request, h11.Data(self._body), h11.EndOfMessage()]
        return b"".join(connection.send(part) or b"" for part in parts)


@dataclass(slots=True)
class _Attempt:
    """One connection: its pieces as they came and, once they are read, what was in them."""

    request: _Request
    asked: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    is_whole: bool = False
    status: int | None = None
    error: str = ""
    written: int = 0
    chunks: int = 0
    tokens: list[tuple[int, float]] = field(default_factory=list)
    _is_read: bool = False

    def begins_with(self, text: bytes) -> bool:
        """Tells whether the answer's first bytes are these."""
        return b"".join(data for _, data in self.pieces[: len(text)]).startswith(text)

    def read(self) -> None:
        """Parses the pieces."""
        if self._is_read:
            return
        self._is_read = True
        parser, rest = self.request.parser(), b""
        for stamp, data in self.pieces:
            parser.receive_data(data)
            while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    self.status = event.status_code
                elif isinstance(event, h11.Data):
                    *lines, rest = (rest + bytes(event.data)).split(b"\n")
                    for line in lines:
                        self._take(line, stamp)
                elif isinstance(event, h11.EndOfMessage):
                    break
        if self.status != 200:
            self.error = rest.decode(errors="replace")

    def _take(self, line: bytes, stamp: float) -> None:
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise ServerError(f"a stream ended with an error: {event['error'].get('message')}")
        if event.get("usage"):
            self.written = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            self.chunks += 1
            self.tokens.extend((token, stamp) for token in choice.get("token_ids") or ())


def _heard(attempts: Sequence[_Attempt]) -> StreamResult:
    heard = StreamResult(attempts[0].asked, attempts=len(attempts))
    for attempt in attempts:
        attempt.read()
        for place, (token, stamp) in enumerate(attempt.tokens):
            if place == len(heard.tokens):
                heard.tokens.append(token)
                heard.stamps.append(stamp)
            heard.agrees &= heard.tokens[place] == token
    last = attempts[-1]
    heard.first_byte = next(attempt.pieces[0][0] for attempt in attempts if attempt.pieces)
    heard.ended, heard.written, heard.chunks = last.pieces[-1][0], last.written, last.chunks
    return heard


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None, url
    return parts.hostname, parts.port
