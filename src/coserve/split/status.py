"""Asks an executor for its status; loads no torch."""

import os
import threading
from typing import Final, TypeVar

from coserve.errors import Unreachable, error_named
from coserve.split.address import Address, shut
from coserve.split.messages import (
    MOST_HEADER,
    VERSION,
    BaseHello,
    ClientHello,
    ExecutorStatus,
    Limits,
    StatusRequest,
    ToClient,
    decode_to_client,
    encode_header,
)
from coserve.split.tls import ClientTls
from coserve.wire.frames import ByteStream, FrameReader, send_with_payload
from coserve.wire.messages import Fault

PATIENCE: Final = 10.0  # seconds without a message after which no executor is there
NAME: Final = "coserve status"  # of the connection that asks
T = TypeVar("T", bound=ToClient)


def ask_status(
    address: Address, key: str = "", patience: float = PATIENCE, tls: ClientTls | None = None
) -> ExecutorStatus:
    """Connects, asks, and leaves. `tls` is for a `tls:` address; without it the system's authorities have to
    know the executor. Raises Unreachable, and what the executor refuses: ConfigError for a key, a version or
    a certificate."""
    try:
        connected = address.connect()
    except OSError as error:
        raise Unreachable(f"no executor answers at {address}: {error.strerror or error}") from error
    timer = threading.Timer(patience, shut, [connected])
    timer.start()
    try:
        stream: ByteStream = connected
        if address.is_encrypted:
            stream = (tls or ClientTls()).connect(connected, address.host)
        return _asked(stream, address, key)
    except (OSError, EOFError) as error:
        raise Unreachable(f"what answers at {address} is no executor: {error}") from error
    finally:
        timer.cancel()
        connected.close()


def _asked(stream: ByteStream, address: Address, key: str) -> ExecutorStatus:
    hello = ClientHello(VERSION, f"{NAME} {os.uname().nodename}/{os.getpid()}"[:512], key=key)
    reader = FrameReader(stream, most=MOST_HEADER)
    send_with_payload(stream, encode_header(hello), ())
    _next(reader, address, BaseHello)
    send_with_payload(stream, encode_header(StatusRequest()), ())
    return _next(reader, address, ExecutorStatus)


def _next(reader: FrameReader, address: Address, kind: type[T]) -> T:
    """The next message. Raises the error of a refusal, and Unreachable for another kind of message."""
    data = reader.read()
    answer = None if data is None else decode_to_client(data, Limits())
    if isinstance(answer, Fault):
        raise error_named(answer.kind, answer.text)
    if not isinstance(answer, kind):
        raise Unreachable(f"what answers at {address} is no executor of version {VERSION}")
    return answer
