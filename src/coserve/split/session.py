"""One client of a base executor: one thread reads its calls, and another sends messages that cannot be sent
at once.

A client has few calls under way, so one that reads its answers slowly delays only itself. Any error of its
connection ends that connection alone.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final

import msgspec
from torch import Tensor

from coserve.errors import ConfigError, CoserveError, RequestError
from coserve.split.channel import MOST_UNDER_WAY, Channel, Rest, SocketChannel
from coserve.split.clients import ClientAccount
from coserve.split.executor import BaseExecutor
from coserve.split.messages import (
    Beat,
    ClientHello,
    ExecutorStatus,
    GroupTable,
    LinearAnswer,
    LinearCall,
    ToExecutor,
    decode_to_executor,
)
from coserve.split.shared_memory import ExecutorSharedChannel, make_slots, send_with_file
from coserve.split.work import Outcome, Work
from coserve.wire.messages import Fault

_log = logging.getLogger(__name__)
# Seconds without a byte, within a message or an unread answer, after which the client is stopped or gone.
SILENT_SECONDS: Final = 30.0
# Seconds in which a client is not read after a wrong call or a question for the status: these wait in no
# queue and count towards no share, and one that sends nothing else would keep the lock from others.
_PAUSE: Final = 0.005


class ClientSession:
    """Serves the client at the other end of a channel."""

    def __init__(
        self,
        channel: Channel[ToExecutor],
        executor: BaseExecutor,
        accepts: Callable[[str], bool],
        left: "Callable[[ClientSession], None]",
        slot_bytes: int = 0,
        silence: float = SILENT_SECONDS,
        admit: "Callable[[ClientSession], None]" = lambda _: None,
    ) -> None:
        """`accepts` tells whether a key is valid; `admit` is called once it is, and may refuse by an error;
        `left` is called once, when the session is over. Until then the channel's owner bounds the time.
        `slot_bytes` are offered as shared memory to clients at a unix socket; 0 is none. `silence` is that of
        the channel."""
        self._channel, self._executor, self._left = channel, executor, left
        self._accepts, self._admit = accepts, admit
        self._slot_bytes, self._silence = slot_bytes, silence
        self._hello: ClientHello | None = None  # its greeting, where that has come
        self.key: str | None = None  # the accepted one
        self._table = GroupTable(executor.hello)
        self._account: ClientAccount | None = None  # after its greeting
        self._under_way = 0  # messages without an answer
        self._rows = 0  # in these
        self._lock = threading.Lock()  # of the channel's sending end while nothing waits there
        self._answered = threading.Condition(self._lock)
        self._waiting = 0  # messages that the writer has still to send
        self._is_gone = False  # it takes no answers, and what it sent before is not read
        self._rests: SimpleQueue[tuple[Rest, int | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="split-client", daemon=True)

    def start(self, hello: ClientHello | None = None) -> None:
        """Answers its greeting, which is received first where it is None, and serves, on a thread of its
        own."""
        self._hello = hello
        self._thread.start()

    def close(self) -> None:
        """Wakes its threads, which end."""
        self._channel.shut()

    def join(self, seconds: float) -> None:
        """Waits for its threads to end after `close`, or for so long."""
        if self._thread.ident is not None:  # else it is about to start, and ends at once
            self._thread.join(seconds)

    def beat(self) -> None:
        """Tells a client that waits that the executor is alive. Does not block."""
        if self._under_way:
            self._post(Beat(), (), None)

    def _serve(self) -> None:
        try:
            self._read()
        except CoserveError as error:
            self._channel.refuse(Fault.of(error))
        except OSError as error:
            _log.info("a client's connection ended: %s", error)
        finally:
            self._channel.close()
            self._left(self)

    def _read(self) -> None:
        if not self._greet():
            return
        writer = threading.Thread(target=self._write, name="split-answers", daemon=True)
        writer.start()
        try:
            while not self._is_gone and (message := self._next()) is not None:
                if isinstance(message, ClientHello):
                    raise ConnectionError("a second greeting")
                if isinstance(message, LinearCall):
                    self._wait_for_room(message.rows)
                    self._take(message)
                else:
                    self._wait_for_room(0)
                    self._post(self._executor.status(self._account), (), 0)
                    time.sleep(_PAUSE)
        finally:
            if self._account is not None:
                self._executor.leave(self._account)
            self._channel.shut()
            self._rests.put(None)
            writer.join()

    def _next(self) -> ToExecutor | None:
        """The next message, however long that takes."""
        while True:
            try:
                return self._channel.receive()
            except TimeoutError:
                continue

    def _greet(self) -> bool:
        """Greets the client; False where it has left. Raises the error that refuses it."""
        self._channel.limits = self._executor.hello.limits
        hello = self._hello or self._next()
        if hello is None:
            return False
        if not isinstance(hello, ClientHello):
            raise ConnectionError("a call before the greeting")
        if not self._accepts(hello.key):
            raise ConfigError("the executor does not accept this key")
        self._table.check_hello(hello)
        self.key = hello.key
        self._admit(self)
        self._account = self._executor.join(hello.client, hello.key)
        self._welcome(hello)
        return True

    def _welcome(self, hello: ClientHello) -> None:
        """Answers the greeting, with shared memory where the client proposes it and there is some."""
        channel, base = self._channel, self._executor.hello
        is_possible = isinstance(channel, SocketChannel) and channel.is_local and self._slot_bytes > 0
        made = make_slots(self._slot_bytes) if hello.shared_memory and is_possible else None
        if made is None or not isinstance(channel, SocketChannel):
            channel.send(base)
            return
        file, slots = made
        try:
            # A client's first call comes after this, so nothing has been read ahead.
            self._channel = ExecutorSharedChannel(
                channel.socket, decode_to_executor, slots, self._silence, self._silence
            )
            self._channel.limits = base.limits
            send_with_file(channel.socket, msgspec.structs.replace(base, slots=slots.shape), file)
        finally:
            os.close(file)

    def _take(self, call: LinearCall) -> None:
        try:
            widths, answer = self._table.check_call(call)
        except RequestError as error:
            self._channel.skip_tensors(call)
            self._reply(call, error)
            time.sleep(_PAUSE)
            return
        tensors = self._channel.receive_tensors(call, call.rows, widths, call.dtype)
        assert self._account is not None, "calls come after the greeting"
        reply, nbytes = partial(self._reply, call), call.nbytes + answer
        self._executor.submit(Work(call, tensors, reply, self._account, nbytes=nbytes))

    def _reply(self, call: LinearCall, outcome: Outcome) -> None:
        if isinstance(outcome, CoserveError):
            self._post(LinearAnswer(call.number, 0, Fault.of(outcome)), (), call.rows)
        else:
            nbytes = sum(tensor.nbytes for tensor in outcome)
            self._post(LinearAnswer(call.number, nbytes, slot=call.slot), outcome, call.rows)

    def _post(
        self, message: LinearAnswer | ExecutorStatus | Beat, tensors: Sequence[Tensor], rows: int | None
    ) -> None:
        """Sends at once what the channel takes at once, and leaves the rest to the writer; an answer makes
        room for so many `rows`, None is no answer. Does not block: a handover to another thread costs up to
        50 us."""
        with self._lock:
            if self._waiting:
                if rows is None:
                    return  # a waiting message is a sign of life as well
                rest: Rest | None = partial(self._channel.send, message, tensors)
            else:
                try:
                    rest = self._channel.send_now(message, tensors)
                except OSError:
                    self._is_gone = True
                    self._channel.shut()
                    rest = None
            if rest is not None:
                self._waiting += 1
                self._rests.put((rest, rows))
            elif rows is not None:
                self._make_room(rows)

    def _wait_for_room(self, rows: int) -> None:
        """Waits until enough messages, and rows in them, have been answered for one of `rows` to be under
        way. A single message may have any number of rows."""
        most = self._executor.hello.limits.waiting_rows
        with self._lock:
            self._answered.wait_for(
                lambda: self._under_way < MOST_UNDER_WAY and (not self._rows or self._rows + rows <= most)
            )
            self._under_way += 1
            self._rows += rows

    def _make_room(self, rows: int) -> None:
        self._under_way -= 1
        self._rows -= rows
        self._answered.notify()

    def _write(self) -> None:
        """Sends waiting messages. After a failure it only makes room, until the reader has ended too."""
        while (item := self._rests.get()) is not None:
            rest, rows = item
            try:
                rest()
            except OSError:
                self._is_gone = True
                self._channel.shut()
            del rest, item
            with self._lock:
                self._waiting -= 1
                if rows is not None:
                    self._make_room(rows)
