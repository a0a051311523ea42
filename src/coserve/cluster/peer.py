"""Connections of a cluster: frames with tensors behind them, between ends that both have the cluster's key.

Nothing is encrypted. The key is never sent: each end signs what the other has drawn.
"""

import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, TypeVar

import msgspec
import torch
from torch import Tensor

from coserve.cluster.messages import (
    MOST_BYTES,
    MOST_MESSAGE,
    Challenge,
    Envelope,
    Greeting,
    Message,
    Signed,
    TensorShape,
)
from coserve.errors import ConfigError, Unreachable
from coserve.split.address import Address, shut
from coserve.split.credentials import CLUSTER_KEY
from coserve.split.payload import view_of
from coserve.wire.frames import FrameReader, send_with_payload, timeout_option

UNHEARD: Final = 5.0  # seconds after which who says nothing is taken to be away
_GREETING: Final = 1 << 12  # bytes of a message before the other end has shown that it has the key
_NONCE: Final = 32
_PIECE: Final = 1 << 14  # bytes of a tensor after which their sender is heard
_SILENCE: Final = 20.0  # seconds without a byte within a message after which its connection ends
_T = TypeVar("_T")
_DTYPES: Final = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8)
}


def key_of_cluster() -> bytes:
    """The cluster's key, from the environment. Raises ConfigError where it is not set."""
    if not (key := os.environ.get(CLUSTER_KEY, "")):
        raise ConfigError(f"{CLUSTER_KEY} is not set: all processes of a cluster need its key")
    return key.encode()


class Peer:
    """One end of a connection. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout_option(_SILENCE))
        if sock.family != socket.AF_UNIX:  # bytes that nobody acknowledges end the connection
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNHEARD))
        self._socket, self._sending = sock, threading.Lock()
        self.heard = time.monotonic()  # when bytes came last, also of a message that is long under way
        self._reader = FrameReader(sock, patience=_SILENCE, most=MOST_MESSAGE)
        self._decoder = msgspec.msgpack.Decoder(Envelope)

    @property
    def is_sending(self) -> bool:
        """Tells whether a message is being sent, and others wait: over a slow link for long. A link that
        takes nothing ends by itself."""
        return self._sending.locked()

    def send(self, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Sends a message with tensors [rows, width]. Blocks; raises OSError, after which the connection is
        of no use."""
        own = [tensor.contiguous() for tensor in tensors]
        shapes = tuple(
            TensorShape(len(one), one.shape[1], str(one.dtype).removeprefix("torch.")) for one in own
        )
        body = msgspec.msgpack.encode(Envelope(message, shapes))
        with self._sending:
            try:
                send_with_payload(self._socket, body, [view_of(one) for one in own if one.numel()])
            except OSError:
                self.close()
                raise

    def receive(self, most: int | None = None) -> tuple[Message, list[Tensor]] | None:
        """The next message, of `most` bytes if given; None at the end. Raises ConnectionError for bytes that
        are none, and OSError."""
        while True:
            try:
                data = self._reader.read(most)
                break
            except TimeoutError:
                if self._reader.has_begun:
                    raise ConnectionError("the rest of a message has not come") from None
        if data is None:
            return None
        self.heard = time.monotonic()
        try:
            envelope = self._decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConnectionError(f"a message that is none: {error}") from error
        return envelope.message, [self._tensor(shape) for shape in _checked(envelope.tensors)]

    def close(self) -> None:
        """Ends the connection, which wakes whoever waits for it."""
        shut(self._socket)

    def free(self) -> None:
        """Closes the socket, once nobody waits for it."""
        self._socket.close()

    def challenge(self, key: bytes) -> str:
        """The accepting end's part of a greeting: the id of the scheduler that calls, empty for a worker.
        Raises ConnectionError for an end without the key, and OSError."""
        nonce = secrets.token_bytes(_NONCE)
        self.send(Challenge(nonce))
        answer = self._greeted(Signed)
        if not hmac.compare_digest(answer.signature, _sign(key, b"caller", nonce, answer.nonce)):
            raise ConnectionError("the caller has not the cluster's key")
        self.send(Signed(_sign(key, b"called", answer.nonce, nonce)))
        return self._greeted(Greeting).scheduler

    def introduce(self, key: bytes, scheduler: str) -> None:
        """The calling end's part. Raises as `challenge`."""
        asked, nonce = self._greeted(Challenge), secrets.token_bytes(_NONCE)
        self.send(Signed(_sign(key, b"caller", asked.nonce, nonce), nonce))
        answer = self._greeted(Signed)
        if not hmac.compare_digest(answer.signature, _sign(key, b"called", nonce, asked.nonce)):
            raise ConnectionError("who was called has not the cluster's key")
        self.send(Greeting(scheduler))

    def _greeted(self, kind: type[_T]) -> _T:
        found = self.receive(_GREETING)
        if found is None or not isinstance(found[0], kind):
            raise ConnectionError(
                "the greeting ended: one of both has another key, or is no part of a cluster"
            )
        return found[0]

    def _tensor(self, shape: TensorShape) -> Tensor:
        found = torch.empty(shape.rows, shape.width, dtype=_DTYPES[shape.dtype])
        if found.numel():
            whole = view_of(found)
            for start in range(0, len(whole), _PIECE):
                self._reader.read_payload(whole[start : start + _PIECE], _SILENCE)
                self.heard = time.monotonic()
        return found


def connect(address: str, key: bytes, scheduler: str = "") -> Peer:
    """A greeted connection to a worker. Raises Unreachable and ConfigError."""
    try:
        peer = Peer(Address.parse(address).connect())
        try:
            peer.introduce(key, scheduler)
        except BaseException:
            peer.close()
            peer.free()
            raise
        return peer
    except OSError as error:
        raise Unreachable(f"the worker at {address} cannot be reached: {error.strerror or error}") from error


def hang_up(peer: Peer) -> None:
    """Ends a connection and frees it, whatever state it is in."""
    with suppress(OSError):
        peer.close()
        peer.free()


def _checked(shapes: Sequence[TensorShape]) -> Sequence[TensorShape]:
    """Shapes whose bytes are bounded, before any are allocated. Raises ConnectionError."""
    nbytes = 0
    for shape in shapes:
        if (kind := _DTYPES.get(shape.dtype)) is None:
            raise ConnectionError(f"a tensor of type {shape.dtype!r}")
        nbytes += shape.rows * shape.width * kind.itemsize
    if nbytes > MOST_BYTES:
        raise ConnectionError(f"tensors of {nbytes} bytes, and {MOST_BYTES} are the most")
    return shapes


def _sign(key: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"coserve-cluster/1" + role + b"".join(parts), "sha256")
