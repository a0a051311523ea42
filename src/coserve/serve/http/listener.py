"""uvicorn on the supervisor's socket, ended by a call instead of signals."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from coserve.errors import ConfigError
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
        certificate: tuple[Path, Path] | None = None,
        logs_refused: bool = False,
    ) -> None:
        """`certificate` and its key are files, for HTTPS. With `logs_refused` the access log has what does
        not reach the application. Raises ConfigError where they cannot be used."""
        self._certificate = certificate
        if certificate is not None:
            check_certificate(*certificate)
        self._socket = listener
        self._connections = Connections(limits, shedder, shape_of, logs_refused)
        protocol: Any = partial(HttpConnection, self._connections)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                access_log=False,
                proxy_headers=False,  # by which all of this machine would be proxies
                log_config=None,
                server_header=False,
                timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]
                timeout_graceful_shutdown=_LAST_WORDS,
                h11_max_incomplete_event_size=2 * MOST_HEADER_BYTES,
                ssl_certfile=None if certificate is None else certificate[0],
                ssl_keyfile=None if certificate is None else str(certificate[1]),
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

    def renew(self) -> None:
        """Reads the certificate again, for new connections. Raises ConfigError where it cannot be used; the
        old one stays then."""
        context = getattr(self._server.config, "ssl", None)  # there once it listens
        if self._certificate is not None and context is not None:
            check_certificate(*self._certificate)
            context.load_cert_chain(*self._certificate)

    def stop(self) -> None:
        self._server.should_exit = True


def check_certificate(certificate: Path, key: Path) -> None:
    """Raises ConfigError where a certificate and its key cannot be read, or do not belong together. A key
    with a passphrase is refused, as a server cannot ask for one."""

    def no_passphrase() -> str:
        raise ConfigError(f"the key {key} has a passphrase: it has to be without one")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, no_passphrase)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the certificate {certificate} with the key {key} cannot be used: {why}"
        ) from error


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed; None for the standard one."""
    return uvicorn.Config("", log_config=None).get_loop_factory()
