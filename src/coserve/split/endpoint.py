"""Base executors as an engine calls them: where one is away, calls under way wait and are tried again.

A connection waits some seconds for a successor of its executor and then ends. Every later call tries to
connect once more, so that an executor that comes back after hours is found too.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from coserve.errors import CoserveError, WeightsUnreadable
from coserve.split.address import Address
from coserve.split.calls import Answer, Calls
from coserve.split.connection import ExecutorConnection, PendingAnswer, Rows, another_base
from coserve.split.messages import VERSION, BaseHello, ClientHello, LinearCall
from coserve.split.tls import ClientTls
from coserve.split.transport import SocketTransport

_BEAT_SECONDS: Final = 0.25  # seconds between two signs of life of a waiting thread


class Endpoint:
    """One base executor. Any failure of a call is raised as WeightsUnreadable: a later call may succeed.
    `beat` is called repeatedly by threads that wait for an answer."""

    def __init__(
        self, address: str | Address, key: str = "", patience: float = 5.0, tls: ClientTls | None = None
    ) -> None:
        """Connects. `patience` is the seconds that calls wait for an executor that went away before they
        fail; `tls` is for a `tls:` address. Raises ConfigError and Unreachable."""
        where = Address.parse(address) if isinstance(address, str) else address
        self.address = str(where)
        self._transport = SocketTransport(where, tls=tls)
        self.beat: Callable[[], object] = int  # nothing
        self._patience = patience
        self._greeting = ClientHello(VERSION, f"{os.uname().nodename}/{os.getpid()}"[:512], "", key)
        self._connecting = threading.Lock()
        self._connection = ExecutorConnection(self._transport, self._greeting, patience)
        self.base: BaseHello = self._connection.base

    def submit(self, call: LinearCall, rows: Rows, widths: Sequence[int]) -> "_EndpointAnswer":
        """See `ExecutorConnection.submit`."""
        connection = self._connection
        try:
            try:
                return _EndpointAnswer(self, connection.submit(call, rows, widths))
            except CoserveError:  # it has ended
                return _EndpointAnswer(self, self._successor(connection).submit(call, rows, widths))
        except CoserveError as error:
            raise WeightsUnreadable(str(error)) from error

    def close(self) -> None:
        """Ends the connection; calls without an answer fail."""
        self._connection.close()

    def _successor(self, ended: ExecutorConnection) -> ExecutorConnection:
        """The connection after one that has ended. Raises CoserveError."""
        with self._connecting:
            if self._connection is ended:
                found = ExecutorConnection(self._transport, self._greeting, self._patience)
                if not found.base.is_same_base(self.base):
                    found.close()
                    raise WeightsUnreadable(another_base(self.address, found.base, self.base))
                self._connection = found
            return self._connection


class _EndpointAnswer:
    def __init__(self, endpoint: Endpoint, answer: PendingAnswer) -> None:
        self._endpoint, self._answer = endpoint, answer

    def result(self, timeout: float | None = None) -> list[Tensor]:
        """Waits for the answer's tensors. Raises WeightsUnreadable, and TimeoutError after about `timeout`
        seconds."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return self._answer.result(_BEAT_SECONDS)
            except TimeoutError:
                self._endpoint.beat()
                if time.monotonic() >= until:
                    raise
            except CoserveError as error:
                raise WeightsUnreadable(str(error)) from error


class HiddenRows:
    """Endpoints in a mode of privacy, as one source. A wrong answer is an error like any other."""

    def __init__(self, hidden: Calls, address: str, plain: Calls | None = None) -> None:
        """`address` names them in errors. Calls go to `plain` until `hide`, where that is given: a mode with
        fewer digits would fail the proof of the base, whose rows are of random tokens."""
        self._hidden, self.address = hidden, address
        self._calls = hidden if plain is None else plain
        self.base: BaseHello = hidden.base

    def hide(self) -> None:
        """Has all rows hidden from now on."""
        self._calls = self._hidden

    def submit(self, call: LinearCall, rows: Rows, widths: Sequence[int]) -> "_HiddenAnswer":
        """Starts a call. Raises WeightsUnreadable."""
        try:
            return _HiddenAnswer(self._calls.submit(call, rows, widths))
        except CoserveError as error:
            raise WeightsUnreadable(str(error)) from error

    def close(self) -> None:
        """Ends the connections."""
        self._hidden.close()


class _HiddenAnswer:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def result(self, timeout: float | None = None) -> list[Tensor]:
        """Raises WeightsUnreadable."""
        try:
            return self._answer.result(timeout)
        except CoserveError as error:
            raise WeightsUnreadable(str(error)) from error
