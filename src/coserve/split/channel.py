"""The seam of split execution's transports.

A `Transport` connects a client, which gives a `Channel`: a header is sent with its tensors, and received
with them. In-process, socket and shared memory are three of them; `SocketChannel` is the plain twin of the
others.

Tensors on GPUs would be two further channels. CUDA IPC is `SharedChannel` with device memory in its slots:
each side opens the other's handle (`cudaIpcGetMemHandle`, 64 bytes) at the greeting, in place of the file
descriptor, and each header names an event (`cudaIpcGetEventHandle`) that the reader's stream waits for, as
the socket's order says nothing about a GPU's. NCCL, between GPUs, is a channel whose headers go over the
socket and whose `send` and `receive_tensors` are `send` and `recv` of a communicator of two ranks, made at
the greeting from the executor's unique id. Both need tensors that stay on their device in `payload.py` and in
the executor's join of rows, and nothing else: calls, queues, retries and refusals know no transport.
"""

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Generic, TypeVar

from torch import Tensor

from coserve.split.address import shut
from coserve.split.messages import (
    MOST_HEADER,
    BaseHello,
    CallDtype,
    ClientHello,
    Limits,
    LinearAnswer,
    LinearCall,
    ToClient,
    ToExecutor,
    encode_header,
)
from coserve.split.payload import new_rows, view_of
from coserve.wire.frames import (
    ByteStream,
    FrameReader,
    frame_views,
    send_views,
    send_views_now,
    timeout_option,
)

MOST_UNDER_WAY: Final = 4  # most unanswered calls of one connection that an executor reads
_AT_ONCE: Final = 1 << 16  # bytes of a message that a computing thread sends itself
_SKIP: Final = 1 << 20  # bytes of a refused payload that are read at once
_LAST_SECONDS: Final = 0.2  # seconds in which a refused client can read the reason

In = TypeVar("In")  # ToExecutor or ToClient
Decode = Callable[[bytes, Limits], In]
Rest = Callable[[], None]  # sends the rest of a message; blocks, and raises OSError


class Channel(ABC, Generic[In]):
    """One end of a connection; `In` is the type of the other end's messages. One thread may send while
    another receives. Tensors are contiguous, on the CPU, of the base's type, [rows, width]."""

    limits: Limits = Limits()  # of what is received

    @abstractmethod
    def send(self, message: ToExecutor | ToClient, tensors: Sequence[Tensor] = ()) -> None:
        """Sends a message with its tensors, which may be changed afterwards. Blocks; raises OSError."""

    def send_now(self, message: ToExecutor | ToClient, tensors: Sequence[Tensor] = ()) -> Rest | None:
        """Sends as much as is possible without waiting. Returns a function that sends the rest, None where
        nothing is left. No other message may be sent before that."""
        return lambda: self.send(message, tensors)

    @abstractmethod
    def receive(self) -> In | None:
        """Waits for the next message; None at the end. Raises TimeoutError (the next call continues),
        ConnectionError for invalid bytes, OSError."""

    @abstractmethod
    def receive_tensors(
        self, message: LinearCall | LinearAnswer, rows: int, widths: Sequence[int], dtype: CallDtype
    ) -> list[Tensor]:
        """The tensors [rows, width] of the last message. Raises ConnectionError where it has others,
        TimeoutError where they do not come, and OSError. The connection cannot be used after these."""

    @abstractmethod
    def skip_tensors(self, message: LinearCall | LinearAnswer) -> None:
        """Discards the last message's tensors. Raises as `receive_tensors`."""

    @abstractmethod
    def shut(self) -> None:
        """Ends both directions, which wakes threads that wait here. Any thread may call it."""

    def close(self) -> None:
        """Shuts the channel and frees its resources, once no thread waits here."""
        self.shut()

    def refuse(self, message: ToClient) -> None:
        """Sends a last message, as far as that is possible at once, and closes."""
        with suppress(OSError):
            self.send(message)
        self.close()


class Transport(ABC):
    """Connects clients to an executor. `str` of it is its address."""

    @abstractmethod
    def connect(self, hello: ClientHello, silence: float) -> tuple[Channel[ToClient], BaseHello]:
        """A greeted connection. It ends after `silence` seconds without a byte within a message. Raises
        Unreachable, and the error of an executor's refusal."""


class SocketChannel(Channel[In]):
    """Messages and the bytes of tensors on a stream of bytes. A payload is copied into the kernel and out of
    it."""

    def __init__(
        self,
        sock: socket.socket,
        decode: Decode[In],
        stream: ByteStream | None = None,
        tick: float = 0.0,
        silence: float = 0.0,
    ) -> None:
        """`stream` is the socket where it is None. `receive` raises TimeoutError after `tick` seconds. The
        connection ends after `silence` seconds without a byte within a message, either way; 0 is never."""
        self.socket = sock
        self.stream: ByteStream = sock if stream is None else stream
        self._decode, self._tick, self._silence = decode, tick, silence
        self._reader = FrameReader(self.stream, patience=tick, most=MOST_HEADER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout_option(silence))

    @property
    def is_local(self) -> bool:
        """Tells whether it is a unix socket."""
        return self.socket.family == socket.AF_UNIX

    def send(self, message: ToExecutor | ToClient, tensors: Sequence[Tensor] = ()) -> None:
        send_views(self.stream, _views(message, tensors))

    def send_now(self, message: ToExecutor | ToClient, tensors: Sequence[Tensor] = ()) -> Rest | None:
        if self.stream is not self.socket or sum(tensor.nbytes for tensor in tensors) > _AT_ONCE:
            return super().send_now(message, tensors)
        left = send_views_now(self.socket, _views(message, tensors))
        return (lambda: send_views(self.stream, left)) if left else None

    def receive(self) -> In | None:
        try:
            data = self._reader.read()
        except TimeoutError:
            if self._reader.has_begun and self._tick >= self._silence:
                raise ConnectionError("the rest of a message has not come") from None
            raise
        return None if data is None else self._decode(data, self.limits)

    def receive_now(self, most: int) -> In | None:
        """As `receive`, of a message of `most` bytes, while the socket does not block: raises TimeoutError
        where some of them have still to come."""
        data = self._reader.read(most)
        return None if data is None else self._decode(data, self.limits)

    def receive_tensors(
        self, message: LinearCall | LinearAnswer, rows: int, widths: Sequence[int], dtype: CallDtype
    ) -> list[Tensor]:
        if message.slot is not None:
            raise ConnectionError("a slot of shared memory, of which there is none")
        flat, tensors = new_rows(rows, widths, dtype)
        if flat.nbytes != message.nbytes:
            raise ConnectionError(f"a payload of {message.nbytes} bytes instead of {flat.nbytes}")
        self._reader.read_payload(view_of(flat), self._silence)
        return tensors

    def skip_tensors(self, message: LinearCall | LinearAnswer) -> None:
        if message.slot is not None:
            raise ConnectionError("a slot of shared memory, of which there is none")
        left = message.nbytes
        nothing = memoryview(bytearray(min(left, _SKIP)))
        while left:
            self._reader.read_payload(nothing[: min(left, _SKIP)], self._silence)
            left -= min(left, _SKIP)

    def shut(self) -> None:
        shut(self.socket)

    def close(self) -> None:
        self.shut()
        self.socket.close()

    def refuse(self, message: ToClient) -> None:
        timer = threading.Timer(_LAST_SECONDS, self.shut)  # even while the other end sends
        timer.start()
        with suppress(OSError):
            self.send(message)
            self.socket.shutdown(socket.SHUT_WR)
            while self.socket.recv(_SKIP):  # closed with bytes unread, TCP would take the message back
                pass
        timer.cancel()
        self.close()


def _views(message: ToExecutor | ToClient, tensors: Sequence[Tensor]) -> list[memoryview]:
    return frame_views(encode_header(message), [view_of(tensor.contiguous()) for tensor in tensors])
