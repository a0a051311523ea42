"""uvicorn on the supervisor's socket, ended by a call instead of signals."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import uvicorn

from coserve.serve.answering.cost import MOST_HEADER_BYTES
from coserve.serve.errors import ErrorShape, openai_shape
from coserve.serve.http.connections import ConnectionLimits, Connections, HttpConnection
from coserve.serve.http.shedding import LoadShedder

_LAST_WORDS = 5  # seconds for answers that are being sent when it ends


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Listener:
    """Serves an application on a listening socket until `stop`."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        limits: ConnectionLimits = ConnectionLimits(),
        shedder: LoadShedder | None = None,
        shape_of: Callable[[str], ErrorShape] = openai_shape,
    ) -> None:
        self._socket = listener
        self._connections = Connections(limits, shedder, shape_of)
        protocol: Any = partial(HttpConnection, self._connections)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]
                timeout_graceful_shutdown=_LAST_WORDS,
                h11_max_incomplete_event_size=2 * MOST_HEADER_BYTES,
            )
        )

    async def run(self) -> None:
        """Returns after `stop`, when connections have ended."""
        watching = asyncio.create_task(self._connections.watch(), name="connections")
        try:
            await self._server.serve([self._socket])
        finally:
            watching.cancel()

    async def started(self) -> None:
        """Waits until connections are accepted."""
        while not self._server.started:
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed; None for the standard one."""
    return uvicorn.Config("", log_config=None).get_loop_factory()
