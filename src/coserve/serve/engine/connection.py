"""One connection to one engine, and what that engine was told on it."""

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
    RemoveAdapter,
    Reply,
)


@dataclass(slots=True, eq=False)
class EngineConnection:
    """`loads` are the adapters that the engine has, or is looking at; `submitters` bring requests in that
    have to wait for something first."""

    hello: Hello
    writer: asyncio.StreamWriter
    loads: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    submitters: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _replies: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    _outbox: list[msgspec.Raw] = field(default_factory=list)
    _is_open: bool = True

    def post(self, command: Command) -> None:
        """Sends a command; commands that are posted in one turn of the event loop go out as one message.
        Raises RequestError for a command that no message can hold."""
        packed = pack_command(command)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(packed)

    def ask(
        self, command: AddAdapter | RemoveAdapter | PinAdapter | CheckMethod | CheckJob
    ) -> asyncio.Future[None]:
        """Sends a command that has a reply; the future is done when the engine has replied. It raises the
        error that the engine replied with, or ConnectionError where the engine died meanwhile."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.post(command)
        self._replies[command.ref] = waiting
        return waiting

    def take(self, reply: Reply) -> None:
        """Takes in a reply of the engine's."""
        waiting = self._replies.pop(reply.ref, None)
        if waiting is None or waiting.done():
            return
        if reply.fault is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error_named(reply.fault.kind, reply.fault.text))
            waiting.exception()  # read here, for nobody may be waiting any more

    def end(self) -> None:
        """Ends the connection: nothing is sent any more, and futures of replies raise ConnectionError."""
        self._is_open = False
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the engine died"))
                waiting.exception()
        for task in self.submitters.values():
            task.cancel()

    def is_loaded(self, key: str) -> bool:
        """Tells whether the engine has this adapter."""
        load = self.loads.get(key)
        return load is not None and load.done() and load.exception() is None

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if self._is_open:
            write_frame(self.writer, encode_commands(commands))
