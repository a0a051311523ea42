"""A client's connection to a base executor.

Calls are answered out of order. An executor keeps nothing between calls, so when it goes away, each call
without an answer is sent again to its successor at the same address.
"""

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from torch import Tensor

from coserve.errors import AdapterMismatch, CoserveError, EngineLost, Unreachable, error_named
from coserve.split.address import Address, shut
from coserve.split.messages import (
    MOST_HEADER,
    VERSION,
    BaseHello,
    CallDtype,
    ClientHello,
    Dtype,
    Limits,
    LinearAnswer,
    LinearCall,
    decode_to_client,
    encode_header,
)
from coserve.split.payload import new_rows, view_of
from coserve.wire.frames import FrameReader, send_frame, send_with_payload
from coserve.wire.messages import Fault

HANDSHAKE_SECONDS: Final = 10.0
_MOST_SENT: Final = 4  # times that a call is sent: it may be what ends executors
_RETRY_SECONDS: Final = 0.1  # between two attempts to reconnect
Rows = Sequence[Tensor]  # each [rows, width], contiguous, on the CPU, of the base's type


@dataclass(slots=True)
class _Open:
    """A call without an answer, which may be sent again."""

    call: LinearCall
    rows: Rows
    widths: Sequence[int]  # of the answer's tensors
    future: "Future[list[Tensor]]"
    sent: int = 0


class ExecutorConnection:
    """Any thread may call; a thread of its own reads the answers, and reconnects."""

    def __init__(self, address: Address, hello: ClientHello, patience: float = 60.0) -> None:
        """Connects. `patience` is how long calls wait for an executor that went away, in seconds. Raises
        Unreachable, and what the executor refuses: AdapterMismatch for another base, ConfigError for a key or
        a version."""
        self.address = address
        self._hello, self._patience = hello, patience
        self._open: dict[int, _Open] = {}
        self._sending = threading.Lock()  # of the socket's writing end, and of what follows
        self._number = 0
        self._closed: CoserveError | None = None
        self._socket, reader, self.base = self._connect()
        self._read_beside(self._socket, reader)

    def __deepcopy__(self, memo: Mapping[int, object]) -> "ExecutorConnection":
        return self  # copies of a model are clients of the same executor

    def submit(self, call: LinearCall, rows: Rows, widths: Sequence[int]) -> "Future[list[Tensor]]":
        """Sends a call, whose number is replaced; the future has the answer's tensors [rows, width]. It
        raises what the executor refuses, and Unreachable."""
        future: Future[list[Tensor]] = Future()
        with self._sending:
            if self._closed is not None:
                raise self._closed
            self._number += 1
            found = _Open(msgspec.structs.replace(call, number=self._number), rows, widths, future)
            self._open[self._number] = found
            self._send(found)
        return future

    def close(self) -> None:
        """Ends the connection; calls without an answer fail."""
        with self._sending:
            self._end(Unreachable(f"the connection to the executor at {self.address} was closed"))

    def _end(self, error: CoserveError) -> None:
        """Fails all open calls and all later ones; the lock is held."""
        self._closed = self._closed or error
        shut(self._socket)
        for number in list(self._open):
            self._settle(number, self._closed)

    def _connect(self) -> tuple[socket.socket, FrameReader, BaseHello]:
        try:
            connected = self.address.connect()
        except OSError as error:
            raise Unreachable(f"no executor answers at {self.address}: {error.strerror or error}") from error
        timer = threading.Timer(HANDSHAKE_SECONDS, shut, [connected])
        timer.start()
        try:
            with suppress(OSError):  # who refuses at once has said why
                send_frame(connected, encode_header(self._hello))
            reader = FrameReader(connected, most=MOST_HEADER)
            data = reader.read()
            answer = None if data is None else decode_to_client(data, Limits())
        except (OSError, EOFError) as error:
            connected.close()
            raise Unreachable(f"what answers at {self.address} is no executor: {error}") from error
        finally:
            timer.cancel()
        if isinstance(answer, BaseHello) and answer.version == VERSION:
            return connected, reader, answer
        connected.close()
        if isinstance(answer, Fault):
            raise error_named(answer.kind, answer.text)
        raise Unreachable(f"what answers at {self.address} is no executor of version {VERSION}")

    def _read_beside(self, connected: socket.socket, reader: FrameReader) -> None:
        threading.Thread(
            target=self._read, args=(connected, reader), name="split-answers", daemon=True
        ).start()

    def _read(self, connected: socket.socket, reader: FrameReader) -> None:
        """Takes answers until the stream ends, then reconnects."""
        try:
            while (data := reader.read()) is not None:
                self._take(data, reader)
        except OSError:
            pass  # a malformed answer ends its connection, as a dead executor does
        shut(connected)
        try:
            self._reconnect()
        except CoserveError as error:
            with self._sending:
                self._end(error)
        finally:
            connected.close()

    def _take(self, data: bytes, reader: FrameReader) -> None:
        answer = decode_to_client(data, self.base.limits)
        found = self._open.get(answer.number) if isinstance(answer, LinearAnswer) else None
        if not isinstance(answer, LinearAnswer) or found is None:
            raise ConnectionError("an answer to a call that was not made")
        if answer.fault is not None:
            error = error_named(answer.fault.kind, answer.fault.text)
            self._settle(answer.number, error)
            return
        flat, tensors = new_rows(found.call.rows, found.widths, found.call.dtype)
        if flat.nbytes != answer.nbytes:
            raise ConnectionError(f"an answer of {answer.nbytes} bytes instead of {flat.nbytes}")
        reader.read_payload(view_of(flat))
        self._settle(answer.number, tensors)

    def _settle(self, number: int, outcome: list[Tensor] | CoserveError) -> None:
        found = self._open.pop(number, None)
        if found is None:
            return  # the connection was closed meanwhile
        if isinstance(outcome, CoserveError):
            found.future.set_exception(outcome)
        else:
            found.future.set_result(outcome)

    def _reconnect(self) -> None:
        """Connects again, and sends open calls again. Raises CoserveError."""
        until = time.monotonic() + self._patience
        while self._closed is None:
            try:
                connected, reader, base = self._connect()
                break
            except Unreachable:
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY_SECONDS)
        else:
            return
        if (base.fingerprint, base.dtype, base.groups) != _identity(self.base):
            connected.close()
            raise AdapterMismatch(
                f"another base is at {self.address} now: {base.fingerprint}, not {self.base.fingerprint}"
            )
        with self._sending:
            if self._closed is not None:
                connected.close()
                return
            self._socket = connected
            self._read_beside(connected, reader)
            for found in sorted(self._open.values(), key=lambda found: found.call.number):
                self._send_again(found)

    def _send_again(self, found: _Open) -> None:
        if found.sent < _MOST_SENT:
            self._send(found)
        else:
            error = EngineLost(
                f"{found.sent} times the executor at {self.address} went away during this call"
            )
            self._settle(found.call.number, error)

    def _send(self, found: _Open) -> None:
        """Sends a call; one that cannot be sent now is sent after reconnecting."""
        found.sent += 1
        try:
            send_with_payload(self._socket, encode_header(found.call), [view_of(rows) for rows in found.rows])
        except OSError:
            shut(self._socket)  # which wakes the reader


def call_of(paths: Sequence[str], rows: Rows, dtype: CallDtype, **fields: Any) -> LinearCall:
    """A call with these tensors, for `ExecutorConnection.submit`; `fields` are its direction and work."""
    nbytes = sum(tensor.nbytes for tensor in rows)
    return LinearCall(0, tuple(paths), rows=len(rows[0]), dtype=dtype, nbytes=nbytes, **fields)


def _identity(base: BaseHello) -> tuple[str, Dtype, object]:
    return base.fingerprint, base.dtype, base.groups
