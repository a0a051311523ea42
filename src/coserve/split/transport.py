"""A client's way to an executor at an address: a unix socket with shared memory, TCP, TCP with TLS."""

import random
import socket
import threading
import time
from contextlib import suppress
from typing import Final

import msgspec

from coserve.errors import CoserveError, Unreachable, error_named
from coserve.split.address import Address, shut
from coserve.split.channel import Channel, SocketChannel, Transport
from coserve.split.messages import (
    VERSION,
    BaseHello,
    ClientHello,
    ToClient,
    decode_to_client,
)
from coserve.split.shared_memory import ClientSharedChannel, FileStream, Slots
from coserve.split.tls import ClientTls
from coserve.wire.frames import ByteStream
from coserve.wire.messages import Fault

HANDSHAKE_SECONDS: Final = 10.0
# Seconds between attempts of a client that was sent away while others crowd an executor.
_PAUSES: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
TICK_SECONDS: Final = 0.2  # seconds after which a waiting client checks for timeouts


class SocketTransport(Transport):
    """Connects to the executor at an address."""

    def __init__(self, address: Address, shared_memory: bool = True, tls: ClientTls | None = None) -> None:
        """`shared_memory` is proposed at unix sockets; `tls` is for `tls:` addresses."""
        self._address, self._tls = address, tls or ClientTls()
        self._proposes = shared_memory and bool(address.path)

    def __str__(self) -> str:
        return str(self._address)

    def connect(self, hello: ClientHello, silence: float) -> tuple[Channel[ToClient], BaseHello]:
        for pause in _PAUSES:
            try:
                return self._connect(hello, silence)
            except Unreachable as error:
                if not isinstance(error.__cause__, ConnectionResetError | BrokenPipeError):
                    raise
            time.sleep(pause * random.uniform(0.5, 1.5))
        return self._connect(hello, silence)

    def _connect(self, hello: ClientHello, silence: float) -> tuple[Channel[ToClient], BaseHello]:
        try:
            connected = self._address.connect()
        except OSError as error:
            raise Unreachable(f"no executor answers at {self}: {error.strerror or error}") from error
        files = FileStream(connected)
        timer = threading.Timer(HANDSHAKE_SECONDS, shut, [connected])
        timer.start()
        try:
            stream = self._stream(connected, files)
            channel = SocketChannel[ToClient](connected, decode_to_client, stream, TICK_SECONDS, silence)
            base = greet(channel, msgspec.structs.replace(hello, shared_memory=self._proposes), str(self))
            return self._shared(channel, connected, files, base, silence), base
        except (CoserveError, OSError) as error:
            connected.close()
            if isinstance(error, OSError):
                raise Unreachable(f"what answers at {self} is no executor: {error}") from error
            raise
        finally:
            timer.cancel()
            files.close()

    def _stream(self, connected: socket.socket, files: FileStream) -> ByteStream | None:
        if self._address.is_encrypted:
            return self._tls.connect(connected, self._address.host)
        return files if self._proposes else None

    def _shared(
        self,
        channel: SocketChannel[ToClient],
        connected: socket.socket,
        files: FileStream,
        base: BaseHello,
        silence: float,
    ) -> Channel[ToClient]:
        """The greeted channel, with shared memory where the executor gives some. The executor says nothing
        between its greeting and the first call, so nothing has been read ahead."""
        if base.slots is not None:
            if files.file is None:
                raise ConnectionError("the shared memory that it promises has not come")
            slots = Slots(files.file, base.slots)
            made: SocketChannel[ToClient] = ClientSharedChannel(
                connected, decode_to_client, slots, TICK_SECONDS, silence
            )
        elif self._proposes:
            made = SocketChannel(connected, decode_to_client, None, TICK_SECONDS, silence)
        else:
            made = channel
        made.limits = base.limits
        return made


def greet(channel: Channel[ToClient], hello: ClientHello, name: str) -> BaseHello:
    """Greets an executor. Raises the error of its refusal, Unreachable or OSError."""
    with suppress(OSError):  # an executor that refuses at once has sent the reason
        channel.send(hello)
    answer: ToClient | None = None
    while True:
        with suppress(TimeoutError):  # its time is bounded by a timer
            answer = channel.receive()
            break
    if isinstance(answer, BaseHello) and answer.version == VERSION:
        channel.limits = answer.limits
        return answer
    if answer is None:
        raise Unreachable(
            f"no executor answers at {name}: the connection ended during the greeting, as it does where an "
            "executor ends or has too many connections"
        ) from ConnectionResetError()
    if isinstance(answer, Fault):
        raise error_named(answer.kind, answer.text)
    raise Unreachable(f"what answers at {name} is no executor of version {VERSION}")
