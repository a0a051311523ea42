"""A client's connection to a base executor.

Calls are answered out of order. A thread that waits for an answer receives it itself, together with the
answers for other threads that come before it: a receiving thread of the connection's own would cost a
handover for each. An executor keeps nothing between calls. So when it goes away, each call without an answer
is sent again to its successor at the same address.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from torch import Tensor

from coserve.errors import AdapterMismatch, CoserveError, EngineLost, Unreachable, error_named
from coserve.split.address import Address
from coserve.split.channel import MOST_UNDER_WAY, Channel, Transport
from coserve.split.messages import (
    ITEM_BYTES,
    BaseHello,
    Beat,
    CallDtype,
    ClientHello,
    LinearAnswer,
    LinearCall,
    ToClient,
    differences,
)
from coserve.split.transport import SocketTransport

SILENT_SECONDS: Final = 5.0  # least seconds of silence, while calls wait, that end the connection
_MOST_SENT: Final = 4  # times that a call is sent: the call itself may end executors
_RETRY_SECONDS: Final = 0.1  # between two attempts to reconnect
# Bytes of calls under way, each counted as the larger of its two ways: two pieces (`remote_group.PIECE`), so
# that one is copied while the other is computed. Tensors of calls that wait take memory of the executor.
_MOST_BYTES: Final = 16 << 20
Rows = Sequence[Tensor]  # each [rows, width], contiguous, on the CPU, of the base's type


class PendingAnswer:
    """A call, which may be sent again until its answer is there. It is received once a thread waits for it,
    or for a later one of the same connection."""

    __slots__ = ("_connection", "call", "nbytes", "outcome", "rows", "sent", "widths")

    def __init__(
        self, connection: "ExecutorConnection", call: LinearCall, rows: Rows, widths: Sequence[int]
    ) -> None:
        """`widths` are those of the answer's tensors."""
        self._connection, self.call, self.rows, self.widths = connection, call, rows, widths
        self.nbytes = max(call.nbytes, call.rows * sum(widths) * ITEM_BYTES[call.dtype])  # of the larger way
        self.outcome: list[Tensor] | CoserveError | None = None
        self.sent = 0

    def result(self, timeout: float | None = None) -> list[Tensor]:
        """Waits; raises the call's error, TimeoutError."""
        if (error := self.exception(timeout)) is not None:
            raise error
        assert isinstance(self.outcome, list), "it was waited for, and is no error"
        return self.outcome

    def exception(self, timeout: float | None = None) -> CoserveError | None:
        """Waits; the call's error, if it has one. Raises TimeoutError."""
        if self.outcome is None:
            self._connection.wait(self, timeout)
        return self.outcome if isinstance(self.outcome, CoserveError) else None

    def done(self) -> bool:
        """Tells whether the answer is there."""
        return self.outcome is not None


class ExecutorConnection:
    """Any thread may call, and wait."""

    def __init__(self, where: Address | Transport, hello: ClientHello, patience: float = 60.0) -> None:
        """Connects. `patience` is the seconds that calls wait for an executor that went away or gives no sign
        of life. Raises Unreachable, and the error of a refusal: AdapterMismatch for another base, ConfigError
        for a key or a version."""
        self._transport = SocketTransport(where) if isinstance(where, Address) else where
        self.address = str(self._transport)
        self._hello, self._patience = hello, patience
        self._silence = max(patience, SILENT_SECONDS)
        self._open: dict[int, PendingAnswer] = {}
        self._unsent: deque[PendingAnswer] = deque()  # those of `_open` that wait for room under way
        self._under_way = self._rows_under_way = self._bytes_under_way = 0
        self._sending = threading.Lock()  # of the channel's sending end, and of what precedes
        self._number = 0
        self._closed: CoserveError | None = None
        # For the receiving end: one thread has it, others wait for it or their answer.
        self._turn = threading.Condition(threading.Lock())
        self._is_receiving = False
        self._followers = 0  # that wait, or are about to
        self._heard = time.monotonic()
        self._channel, self.base = self._transport.connect(hello, self._silence)

    def __deepcopy__(self, memo: Mapping[int, object]) -> "ExecutorConnection":
        return self  # copies of a model are clients of the same executor

    def submit(self, call: LinearCall, rows: Rows, widths: Sequence[int]) -> PendingAnswer:
        """Sends a call, whose number is replaced; the result has the answer's tensors [rows, width]. It
        raises the executor's error, EngineLost and Unreachable."""
        with self._sending:
            if self._closed is not None:
                raise self._closed
            self._number += 1
            found = PendingAnswer(self, msgspec.structs.replace(call, number=self._number), rows, widths)
            self._open[self._number] = found
            self._unsent.append(found)
            self._send_unsent()
        return found

    def wait(self, answer: PendingAnswer, timeout: float | None = None) -> None:
        """Receives until this answer is there, or waits while another thread does. Raises TimeoutError."""
        until = None if timeout is None else time.monotonic() + timeout
        if not self._take_turn(answer, until):
            return
        try:
            while answer.outcome is None:
                self._receive()
                if until is not None and time.monotonic() > until and answer.outcome is None:
                    raise TimeoutError("the answer is not there yet")
        finally:
            with self._turn:
                self._is_receiving = False
                self._turn.notify_all()

    def _take_turn(self, answer: PendingAnswer, until: float | None) -> bool:
        """Waits for the turn to receive, or for the answer; tells whether it got the turn."""
        with self._turn:
            self._followers += 1  # set before the check, so that a later answer wakes it
            try:
                while answer.outcome is None and self._is_receiving:
                    if not self._turn.wait(None if until is None else until - time.monotonic()):
                        raise TimeoutError("the answer is not there yet")
            finally:
                self._followers -= 1
            gets_turn = answer.outcome is None
            self._is_receiving = self._is_receiving or gets_turn
            return gets_turn

    def close(self) -> None:
        """Ends the connection; calls without an answer fail."""
        self._channel.shut()  # wakes the thread that sends
        with self._sending:
            self._end(Unreachable(f"the connection to the executor at {self.address} was closed"))

    def _end(self, error: CoserveError) -> None:
        """Fails all open calls and all later ones; the lock is held."""
        self._closed = self._closed or error
        self._channel.shut()
        self._unsent.clear()
        for number in list(self._open):
            self._settle(number, self._closed)

    def _receive(self) -> None:
        """Takes one message, or notes that none came. Connects again where the connection has ended."""
        channel = self._channel
        try:
            message = channel.receive()
            if message is None:
                raise ConnectionError("the executor has ended")
            self._heard = time.monotonic()
            if not isinstance(message, Beat):
                self._take(message, channel)
            return
        except TimeoutError:
            if time.monotonic() - self._heard < self._silence:
                return
            error: CoserveError | None = EngineLost(
                f"the executor at {self.address} has given no sign of life for {self._silence:g} s"
            )
        except OSError:
            error = None  # a malformed answer ends its connection, as a dead executor does
        except BaseException:  # interrupted between two bytes: those that follow have no meaning
            channel.shut()
            raise
        channel.shut()
        try:
            if error is not None:
                raise error
            self._reconnect()
        except CoserveError as failure:
            with self._sending:
                self._end(failure)
        finally:
            channel.close()

    def _take(self, answer: ToClient, channel: Channel[ToClient]) -> None:
        found = self._open.get(answer.number) if isinstance(answer, LinearAnswer) else None
        if not isinstance(answer, LinearAnswer) or found is None:
            raise ConnectionError("an answer to a call that was not made")
        outcome: list[Tensor] | CoserveError
        if answer.fault is not None:
            outcome = error_named(answer.fault.kind, answer.fault.text)
        else:
            outcome = channel.receive_tensors(answer, found.call.rows, found.widths, found.call.dtype)
        with self._sending:
            self._under_way -= 1
            self._rows_under_way -= found.call.rows
            self._bytes_under_way -= found.nbytes
            self._send_unsent()
        self._settle(answer.number, outcome)

    def _settle(self, number: int, outcome: list[Tensor] | CoserveError) -> None:
        found = self._open.pop(number, None)
        if found is None:
            return  # the connection was closed meanwhile
        found.outcome = outcome
        if self._followers:
            with self._turn:
                self._turn.notify_all()

    def _reconnect(self) -> None:
        """Connects again, and sends open calls again. Raises CoserveError."""
        until = time.monotonic() + self._patience
        while self._closed is None:
            try:
                channel, base = self._transport.connect(self._hello, self._silence)
                break
            except Unreachable:
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY_SECONDS)
        else:
            return
        if not base.is_same_base(self.base):
            channel.close()
            raise AdapterMismatch(another_base(self.address, base, self.base))
        with self._sending:
            if self._closed is not None:
                channel.close()
                return
            self._channel = channel
            self._under_way = self._rows_under_way = self._bytes_under_way = 0
            self._unsent = deque(self._open[number] for number in sorted(self._open))
            self._send_unsent()

    def _send_unsent(self) -> None:
        """Sends calls as far as the limits of calls under way allow; the lock is held."""
        while self._unsent and self._has_room(self._unsent[0]):
            found = self._unsent.popleft()
            if found.sent < _MOST_SENT:
                self._send(found)
            else:
                error = EngineLost(
                    f"{found.sent} times the executor at {self.address} went away during this call"
                )
                self._settle(found.call.number, error)

    def _has_room(self, asked: PendingAnswer) -> bool:
        return not self._under_way or (
            self._under_way < MOST_UNDER_WAY
            and self._rows_under_way + asked.call.rows <= self.base.limits.waiting_rows
            and self._bytes_under_way + asked.nbytes <= _MOST_BYTES
        )

    def _send(self, found: PendingAnswer) -> None:
        """Sends a call; one that cannot be sent now is sent after reconnecting."""
        if not self._under_way:
            self._heard = time.monotonic()
        found.sent += 1
        self._under_way += 1
        self._rows_under_way += found.call.rows
        self._bytes_under_way += found.nbytes
        try:
            self._channel.send(found.call, found.rows)
        except OSError:
            self._channel.shut()  # wakes the thread that receives
        except BaseException:  # interrupted: part of the call may have been sent
            self._channel.shut()
            raise


def call_of(paths: Sequence[str], rows: Rows, dtype: CallDtype, **fields: Any) -> LinearCall:
    """A call with these tensors, for `ExecutorConnection.submit`; `fields` are its direction and work."""
    nbytes = sum(tensor.nbytes for tensor in rows)
    return LinearCall(0, tuple(paths), rows=len(rows[0]), dtype=dtype, nbytes=nbytes, **fields)


def another_base(address: str, found: BaseHello, expected: BaseHello) -> str:
    """The error for an address whose base has changed."""
    return f"another base is at {address} now, which is refused: {differences(found, expected)}"
