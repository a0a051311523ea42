"""One connection to one engine, with the state of that connection."""

import asyncio
from dataclasses import dataclass, field

import msgspec

from coserve.errors import error_named
from coserve.wire.codec import encode_commands, pack_command
from coserve.wire.frames import write_frame
from coserve.wire.messages import (
    AddAdapter,
    CheckJob,
    CheckMethod,
    Command,
    Hello,
    PinAdapter,
    PreviewJob,
    RemoveAdapter,
    Reply,
    SessionCommand,
    TraceSteps,
)


@dataclass(slots=True, eq=False)
class EngineConnection:
    """`loads` are the adapters that the engine has or is loading; `submitters` are tasks that submit requests
    after a wait."""

    hello: Hello
    writer: asyncio.StreamWriter
    loads: dict[str, asyncio.Future[Reply]] = field(default_factory=dict)
    submitters: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _replies: dict[int, asyncio.Future[Reply]] = field(default_factory=dict)
    _outbox: list[msgspec.Raw] = field(default_factory=list)
    _is_open: bool = True

    def post(self, command: Command | SessionCommand) -> None:
        """Sends a command; commands of one turn of the event loop are sent as one message. Raises
        RequestError for a command that cannot be encoded."""
        self._put(pack_command(command))

    def _put(self, packed: msgspec.Raw) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(packed)

    def ask(
        self,
        command: AddAdapter
        | RemoveAdapter
        | PinAdapter
        | CheckMethod
        | CheckJob
        | PreviewJob
        | TraceSteps
        | SessionCommand,
    ) -> asyncio.Future[Reply]:
        """Sends a command with a reply; the future completes with it. It raises the engine's error, or
        ConnectionError where the engine died."""
        return self.ask_packed(command.ref, pack_command(command))

    def ask_packed(self, ref: int, packed: msgspec.Raw) -> asyncio.Future[Reply]:
        """As `ask`, of a command with this `ref` that is encoded already."""
        self._put(packed)
        waiting: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[ref] = waiting
        return waiting

    def take(self, reply: Reply) -> None:
        """Completes the future of a reply."""
        waiting = self._replies.pop(reply.ref, None)
        if waiting is None or waiting.done():
            return
        if reply.fault is None:
            waiting.set_result(reply)
        else:
            waiting.set_exception(error_named(reply.fault.kind, reply.fault.text))
            waiting.exception()  # retrieved here, as its waiter may be gone

    def end(self) -> None:
        """Ends the connection: nothing more is sent, and pending replies raise ConnectionError."""
        self._is_open = False
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the engine died"))
                waiting.exception()
        for task in self.submitters.values():
            task.cancel()

    def is_loaded(self, key: str) -> bool:
        """Tells whether the engine has this adapter, or this chain of two bases."""
        if key in self.hello.stitched:
            return True
        load = self.loads.get(key)
        return load is not None and load.done() and load.exception() is None

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if self._is_open and not self.writer.is_closing():
            write_frame(self.writer, encode_commands(commands))
