"""A client and an executor in one process, without a socket: for tests of either."""

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final

from torch import Tensor

from coserve.split.channel import Channel, Decode, In, Transport
from coserve.split.executor import BaseExecutor
from coserve.split.messages import (
    BaseHello,
    CallDtype,
    ClientHello,
    LinearAnswer,
    LinearCall,
    ToClient,
    ToExecutor,
    decode_to_client,
    decode_to_executor,
    encode_header,
)
from coserve.split.payload import CALL_DTYPES
from coserve.split.session import ClientSession
from coserve.split.transport import TICK_SECONDS, greet

_Item = tuple[bytes, list[Tensor]] | None  # a header with its tensors; None is the end
_NEVER: Final = None


class InProcessChannel(Channel[In]):
    """One end of two queues. Headers are encoded and decoded as elsewhere; tensors are copied once."""

    def __init__(
        self,
        incoming: "SimpleQueue[_Item]",
        outgoing: "SimpleQueue[_Item]",
        decode: Decode[In],
        tick: float | None,
    ) -> None:
        """`receive` raises TimeoutError after `tick` seconds; never, if that is None."""
        self._incoming, self._outgoing = incoming, outgoing
        self._decode, self._tick = decode, tick
        self._tensors: list[Tensor] = []  # of the last message
        self._is_shut = threading.Event()

    def send(self, message: ToExecutor | ToClient, tensors: Sequence[Tensor] = ()) -> None:
        if self._is_shut.is_set():
            raise ConnectionError("the channel was shut")
        self._outgoing.put((encode_header(message), [tensor.clone() for tensor in tensors]))

    def send_now(self, message: ToExecutor | ToClient, tensors: Sequence[Tensor] = ()) -> None:
        self.send(message, tensors)  # queues have room

    def receive(self) -> In | None:
        try:
            item = self._incoming.get(timeout=self._tick)
        except Empty:
            raise TimeoutError("no message has come") from None
        if item is None:
            self.shut()
            return None
        data, self._tensors = item
        return self._decode(data, self.limits)

    def receive_tensors(
        self, message: LinearCall | LinearAnswer, rows: int, widths: Sequence[int], dtype: CallDtype
    ) -> list[Tensor]:
        tensors, self._tensors = self._tensors, []
        expected = [((rows, width), CALL_DTYPES[dtype]) for width in widths]
        if [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] != expected:
            raise ConnectionError("other tensors than the message says")
        return tensors

    def skip_tensors(self, message: LinearCall | LinearAnswer) -> None:
        self._tensors = []

    def shut(self) -> None:
        if not self._is_shut.is_set():
            self._is_shut.set()
            self._incoming.put(None)
            self._outgoing.put(None)


class InProcess(Transport):
    """Connects to an executor of this process, which `accepts` keys as a service does."""

    def __init__(self, executor: BaseExecutor, accepts: Callable[[str], bool] = lambda _: True) -> None:
        self._executor, self._accepts = executor, accepts

    def __str__(self) -> str:
        return "this process"

    def connect(self, hello: ClientHello, silence: float) -> tuple[Channel[ToClient], BaseHello]:
        there, back = SimpleQueue[_Item](), SimpleQueue[_Item]()
        ClientSession(
            InProcessChannel(there, back, decode_to_executor, _NEVER),
            self._executor,
            self._accepts,
            lambda session: None,
        ).start()
        channel = InProcessChannel(back, there, decode_to_client, TICK_SECONDS)
        return channel, greet(channel, hello, str(self))
