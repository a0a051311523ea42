"""Base executors as an engine calls them: where one is away, what is under way waits and is tried again.

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
from coserve.split.connection import ExecutorConnection, PendingAnswer, Rows
from coserve.split.messages import VERSION, BaseHello, ClientHello, LinearCall

_BEAT_SECONDS: Final = 0.25  # between two signs of life of who waits


class Endpoint:
    """One base executor. Whatever keeps an answer from coming is raised as WeightsUnreadable: a later call
    may succeed. `beat` is called again and again by who waits for an answer."""

    def __init__(self, address: str, key: str = "", patience: float = 5.0) -> None:
        """Connects. `patience` is how long calls wait for an executor that went away, in seconds, before they
        fail. Raises ConfigError and Unreachable."""
        self.address = Address.parse(address)
        self.beat: Callable[[], object] = int  # nothing
        self._patience = patience
        self._greeting = ClientHello(VERSION, f"{os.uname().nodename}/{os.getpid()}"[:512], "", key)
        self._connecting = threading.Lock()
        self._connection = ExecutorConnection(self.address, self._greeting, patience)
        self.base: BaseHello = self._connection.base

    def submit(self, call: LinearCall, rows: Rows, widths: Sequence[int]) -> "_Answer":
        """See `ExecutorConnection.submit`."""
        connection = self._connection
        try:
            try:
                return _Answer(self, connection.submit(call, rows, widths))
            except CoserveError:  # it has ended
                return _Answer(self, self._successor(connection).submit(call, rows, widths))
        except CoserveError as error:
            raise WeightsUnreadable(str(error)) from error

    def close(self) -> None:
        """Ends the connection; calls without an answer fail."""
        self._connection.close()

    def _successor(self, ended: ExecutorConnection) -> ExecutorConnection:
        """The connection after one that has ended. Raises CoserveError."""
        with self._connecting:
            if self._connection is ended:
                found = ExecutorConnection(self.address, self._greeting, self._patience)
                if (found.base.fingerprint, found.base.dtype, found.base.groups) != (
                    self.base.fingerprint,
                    self.base.dtype,
                    self.base.groups,
                ):
                    found.close()
                    raise WeightsUnreadable(
                        f"another base is at {self.address} now: {found.base.fingerprint}, not "
                        f"{self.base.fingerprint}"
                    )
                self._connection = found
            return self._connection


class _Answer:
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


def connect(addresses: str, key: str = "", patience: float = 5.0) -> list[Endpoint]:
    """The executors at addresses that are separated by commas. Raises as `Endpoint` does."""
    found: list[Endpoint] = []
    try:
        for address in addresses.split(","):
            found.append(Endpoint(address.strip(), key, patience))
    except CoserveError:
        for endpoint in found:
            endpoint.close()
        raise
    return found
