"""Messages from one worker to others: each address has a thread that sends, so that a slow link delays nobody
else."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from coserve.cluster.links import LinkTimer
from coserve.cluster.messages import PassRows, PutPages, RowsVerified, Settled
from coserve.cluster.peer import Peer, connect, hang_up
from coserve.errors import CoserveError, Unreachable

Sent = PassRows | PutPages | RowsVerified
Failed = Callable[[Sent, str, CoserveError], object]  # a message, the address, and why


@dataclass(frozen=True, eq=False)
class _Leaving:
    message: Sent
    tensors: Sequence[Tensor]


class Outbox:
    """Sends messages to one address, in their order; connects when there is something to send. `failed` is
    told of messages that were not sent, or whose receiver did not say that they came before the connection
    ended; it is called on threads of the outbox."""

    def __init__(self, address: str, key: bytes, failed: Failed) -> None:
        self.address, self._key, self._failed = address, key, failed
        self.timer = LinkTimer()
        self._queue: queue.SimpleQueue[_Leaving | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the connection, and of what it has not delivered
        self._peer: Peer | None = None
        self._under_way: list[_Leaving] = []
        threading.Thread(target=self._send, name=f"coserve-to-{address}", daemon=True).start()

    def put(self, message: Sent, tensors: Sequence[Tensor]) -> None:
        """Queues a message."""
        self._queue.put(_Leaving(message, tensors))

    def close(self) -> None:
        """Ends the threads; what waits is not sent."""
        self._queue.put(None)
        with self._lock:
            if self._peer is not None:
                self._peer.close()

    def _send(self) -> None:
        while (leaving := self._queue.get()) is not None:
            try:
                with self._lock:
                    peer = self._peer
                if peer is None:
                    peer = connect(self.address, self._key)
                    with self._lock:
                        self._peer = peer
                    threading.Thread(target=self._watch, args=(peer,), daemon=True).start()
            except (OSError, CoserveError) as error:
                self._failed(leaving.message, self.address, self._told(error))
                continue
            with self._lock:
                self._under_way.append(leaving)
            nbytes = sum(one.nbytes for one in leaving.tensors)
            self.timer.sent(leaving.message.number, nbytes, time.monotonic())
            try:
                peer.send(leaving.message, leaving.tensors)
            except OSError:
                peer.close()  # its watch tells of what was under way

    def _watch(self, peer: Peer) -> None:
        """Notes what has come, until the connection ends."""
        ended: Exception = ConnectionError("it has closed the connection")
        try:
            while (found := peer.receive()) is not None:
                if isinstance(found[0], Settled):
                    self.timer.came(found[0].number, time.monotonic())
                    with self._lock:
                        self._came(found[0].number)
        except OSError as error:
            ended = error
        with self._lock:
            self._peer = None
            lost, self._under_way = self._under_way, []
        self.timer.forget()
        hang_up(peer)
        for leaving in lost:
            self._failed(leaving.message, self.address, self._told(ended))

    def _came(self, number: int) -> None:
        """Notes that the first message of a number has come; the lock is held."""
        for leaving in self._under_way:
            if leaving.message.number == number:
                self._under_way.remove(leaving)
                return

    def _told(self, error: Exception) -> CoserveError:
        if isinstance(error, CoserveError):
            return error
        return Unreachable(f"the worker at {self.address} cannot be reached: {error}")
