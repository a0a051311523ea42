"""Connections of clients to a base executor: a reader and a writer thread for each.

A connection has few calls under way, so that a client that is slow to read its answers holds up itself
alone. Whatever is wrong with one connection ends that one.
"""

import hmac
import logging
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final

from torch import Tensor

from coserve.errors import ConfigError, CoserveError, RequestError, Unreachable
from coserve.split.address import Address, prepare, shut
from coserve.split.batching import BatchingConfig
from coserve.split.clients import ClientAccount
from coserve.split.connection import HANDSHAKE_SECONDS
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.layers import LayerChoice
from coserve.split.messages import (
    MOST_HEADER,
    ClientHello,
    ExecutorStatus,
    GroupTable,
    Limits,
    LinearAnswer,
    LinearCall,
    ToClient,
    decode_to_executor,
    encode_header,
)
from coserve.split.payload import DTYPES, new_rows, view_of
from coserve.split.work import Outcome, Work
from coserve.wire.frames import FrameReader, send_with_payload
from coserve.wire.messages import Fault

_log = logging.getLogger(__name__)
MOST_CLIENTS: Final = 64
_UNDER_WAY: Final = 4  # calls of one connection: more are read once an answer has been sent
_LAST_SECONDS: Final = 0.2  # that a refused client has to read why
_SKIP: Final = 1 << 20  # bytes of a refused payload that are read at once


class SplitService:
    """Accepts clients at an address. `key` is what they must present, empty for none."""

    def __init__(self, executor: BaseExecutor, address: Address, key: str = "") -> None:
        """Listens. Raises ServerError; ConfigError for an address that other hosts can reach, without a
        key."""
        if not key and not address.is_local:
            raise ConfigError(f"{address} can be reached from other hosts, so a key is needed")
        self._executor, self._key = executor, key
        self._clients: set[_Client] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._listening, self.address = address.listen()
        self._thread = threading.Thread(target=self._accept, name="split-accept", daemon=True)
        self._thread.start()

    @property
    def clients(self) -> int:
        """Connections now."""
        return len(self._clients)

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            self._is_closed = True
            clients = list(self._clients)
        shut(self._listening)
        for client in clients:
            client.close()
        self._thread.join()
        self._listening.close()
        self.address.remove()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except OSError:
                if self._is_closed:
                    return
                continue
            prepare(connected)
            client = _Client(connected, self._executor, self._key, self._left)
            with self._lock:
                is_room = len(self._clients) < MOST_CLIENTS and not self._is_closed
                if is_room:
                    self._clients.add(client)
            if is_room:
                client.start()
            else:
                client.refuse(Unreachable(f"the executor has {MOST_CLIENTS} clients, which is all it takes"))

    def _left(self, client: "_Client") -> None:
        with self._lock:
            self._clients.discard(client)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A message with the tensors after it, and the rows that it makes room for."""

    message: LinearAnswer | ExecutorStatus
    rows: int = 0
    tensors: Sequence[Tensor] = ()


class _Room:
    """Room for so many messages without an answer, and so many rows in all of them; one message may have more
    rows than that."""

    def __init__(self, messages: int, rows: int) -> None:
        self._messages, self._rows, self._most_rows = messages, 0, rows
        self._changed = threading.Condition()

    def acquire(self, rows: int) -> None:
        """Waits until there is room."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._messages and (not self._rows or self._rows + rows <= self._most_rows)
            )
            self._messages -= 1
            self._rows += rows

    def release(self, rows: int) -> None:
        """Makes room, once a message has been answered."""
        with self._changed:
            self._messages += 1
            self._rows -= rows
            self._changed.notify()


class _Client:
    def __init__(
        self, connected: socket.socket, executor: BaseExecutor, key: str, left: "Callable[[_Client], None]"
    ) -> None:
        self._socket, self._executor, self._key, self._left = connected, executor, key, left
        self._table = GroupTable(executor.hello)
        self._account: ClientAccount | None = None  # after its greeting
        self._room = _Room(_UNDER_WAY, executor.config.client_rows)
        self._answers: SimpleQueue[_Answer | None] = SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._serve, name="split-client", daemon=True).start()

    def close(self) -> None:
        """Wakes its threads, which end."""
        shut(self._socket)

    def refuse(self, error: CoserveError) -> None:
        """Says why, and ends."""
        self._socket.settimeout(_LAST_SECONDS)
        with suppress(OSError):
            self._send(Fault(type(error).__name__, str(error)))
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(_SKIP):  # closed with bytes unread, TCP would take the message back
                pass
        self._socket.close()

    def _serve(self) -> None:
        try:
            self._read()
        except CoserveError as error:
            self.refuse(error)
        except OSError as error:
            _log.info("a client's connection ended: %s", error)
        finally:
            shut(self._socket)
            self._left(self)

    def _read(self) -> None:
        reader = FrameReader(self._socket, most=MOST_HEADER)
        if not self._greet(reader):
            return
        writer = threading.Thread(target=self._write, name="split-answers", daemon=True)
        writer.start()
        try:
            while (data := reader.read()) is not None:
                message = decode_to_executor(data, self._executor.hello.limits)
                if isinstance(message, ClientHello):
                    raise ConnectionError("a second greeting")
                rows = message.rows if isinstance(message, LinearCall) else 0
                self._room.acquire(rows)
                if isinstance(message, LinearCall):
                    self._take(message, reader)
                else:
                    self._answers.put(_Answer(self._executor.status(self._account)))
        finally:
            if self._account is not None:
                self._executor.leave(self._account)
            shut(self._socket)
            self._answers.put(None)
            writer.join()
            self._socket.close()

    def _greet(self, reader: FrameReader) -> bool:
        """Whether a client is there that may go on. Raises what refuses it."""
        timer = threading.Timer(HANDSHAKE_SECONDS, shut, [self._socket])
        timer.start()
        try:
            data = reader.read()
        finally:
            timer.cancel()
        if data is None:
            return False
        hello = decode_to_executor(data, self._executor.hello.limits)
        if not isinstance(hello, ClientHello):
            raise ConnectionError("a call before the greeting")
        if not hmac.compare_digest(hello.key.encode(), self._key.encode()):
            raise ConfigError("the executor does not accept this key")
        self._table.check_hello(hello)
        self._account = self._executor.join(hello.client)
        self._send(self._executor.hello)
        return True

    def _take(self, call: LinearCall, reader: FrameReader) -> None:
        try:
            self._table.check_call(call)
        except RequestError as error:
            _skip(reader, call.nbytes)
            self._reply(call, error)
            return
        flat, tensors = new_rows(call.rows, self._table.call_widths(call), call.dtype)
        reader.read_payload(view_of(flat))
        assert self._account is not None, "calls come after the greeting"
        reply = partial(self._reply, call)
        self._executor.submit(Work(call, tensors, reply, self._account))

    def _reply(self, call: LinearCall, outcome: Outcome) -> None:
        if isinstance(outcome, CoserveError):
            answer = LinearAnswer(call.number, 0, Fault(type(outcome).__name__, str(outcome)))
            self._answers.put(_Answer(answer, call.rows))
        else:
            answer = LinearAnswer(call.number, sum(tensor.nbytes for tensor in outcome))
            self._answers.put(_Answer(answer, call.rows, outcome))

    def _write(self) -> None:
        """Sends answers; where that fails only makes room, until the reader has ended too."""
        while (answer := self._answers.get()) is not None:
            try:
                self._send(answer.message, *(view_of(tensor.contiguous()) for tensor in answer.tensors))
            except OSError:
                shut(self._socket)
            self._room.release(answer.rows)
            del answer  # nothing is kept while it waits

    def _send(self, message: ToClient, *payload: memoryview) -> None:
        send_with_payload(self._socket, encode_header(message), payload)


def _skip(reader: FrameReader, nbytes: int) -> None:
    nothing = memoryview(bytearray(min(nbytes, _SKIP)))
    while nbytes:
        reader.read_payload(nothing[: min(nbytes, _SKIP)])
        nbytes -= min(nbytes, _SKIP)


def run_service(
    model: str, listen: str, key: str, dtype: str, config: BatchingConfig, choice: LayerChoice
) -> None:
    """Loads a model and serves its linears until SIGTERM or SIGINT. Raises ConfigError, ModelError,
    ServerError."""
    address = Address.parse(listen)
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"type {dtype!r} is none of auto, {', '.join(DTYPES)}")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    limits = Limits(rows=min(Limits().rows, config.client_rows))
    linears = BaseLinears.load(model, dtype, limits, choice)
    executor = BaseExecutor(linears, config)
    service = SplitService(executor, address, key)
    count = sum(len(group.outputs) for group in linears.hello.groups)
    print(
        f"executor of {linears.hello.fingerprint}: {count} linears, {linears.nbytes / 2**20:.1f} MiB, "
        f"at {service.address}",
        flush=True,
    )
    stop.wait()
    service.close()
    executor.close()
