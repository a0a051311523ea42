"""Clients in a process of their own, `python -m coserve_benchmarks.client`, so that they share no interpreter
with what they measure. The process reads a `ClientLoad` in one line, writes a line once that many pieces have
come, and one with all results at the end. Free of torch."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Literal

import msgspec

from coserve.errors import CoserveError, ServerError
from coserve.wire.control import decode_line, encode_line
from coserve_benchmarks.streams import StreamRequest, StreamResult, Streams


class ClientLoad(msgspec.Struct, frozen=True):
    """Requests to a server. After `pieces` pieces of answers, if not 0, the client reports `reached`."""

    url: str
    model: str
    asks: tuple[StreamRequest, ...]
    pieces: int = 0


class ClientStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Status line of the client: `up` before it begins, `reached`, and at the end `heard` or `failed`."""

    kind: Literal["up", "reached", "heard", "failed"]
    heard: list[StreamResult] = []
    processor_seconds: float = 0.0  # that the clients took
    text: str = ""


class Clients:
    """A load under way, in its own process. Use it in a `with`."""

    def __init__(self, url: str, model: str, asks: Sequence[StreamRequest], pieces: int = 0) -> None:
        self._load = ClientLoad(url, model, tuple(asks), pieces)

        self.processor_seconds = 0.0

    def __enter__(self) -> "Clients":
        command = [sys.executable, "-m", "coserve_benchmarks.client"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._expect("up")
        assert self._process.stdin is not None
        self._process.stdin.write(encode_line(self._load) + "\n")
        self._process.stdin.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def wait_reached(self) -> None:
        """Returns when `pieces` pieces have come. Raises ServerError where a stream failed before."""
        self._expect("reached")

    def result(self) -> list[StreamResult]:
        """Results of all streams, once they have ended. Raises ServerError where one failed."""
        line = self._expect("heard")
        self.processor_seconds = line.processor_seconds
        return line.heard

    def _expect(self, kind: str) -> ClientStatus:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise ServerError(f"the clients' process ended with status {self._process.wait()}")
        line = decode_line(text, ClientStatus)
        if line.kind == "failed":
            raise ServerError(line.text)
        if line.kind != kind:
            raise ServerError(f"the clients were expected to say {kind!r}, and said {line.kind!r}")
        return line


def main() -> None:
    """Runs one load."""
    _say(ClientStatus("up"))
    load = decode_line(sys.stdin.readline(), ClientLoad)
    came = 0

    def count() -> None:
        nonlocal came
        came += 1
        if came == load.pieces:
            _say(ClientStatus("reached"))

    streams = Streams(load.url, load.model, count)
    try:
        heard = asyncio.run(streams.run(load.asks))
    except CoserveError as error:
        _say(ClientStatus("failed", text=str(error)))
    else:
        _say(ClientStatus("heard", heard, streams.processor_seconds))


def _say(line: ClientStatus) -> None:
    print(encode_line(line), flush=True)


if __name__ == "__main__":
    main()
