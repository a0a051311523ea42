"""One connection to one engine, with its state; and live requests, which continue on the next one."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from msgspec import structs

from coserve.core.request import Request
from coserve.errors import CoserveError, error_named
from coserve.serve.engine.probation import WorkItem
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
    Token,
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


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request under way, and its tokens so far. `folders` have the files of its adapter and of the
    alternatives that are adapters, by key: every engine loads them on first use."""

    request: Request
    folders: Mapping[str, Path]
    tokens: list[int] = field(default_factory=list)
    scored: int = 0  # prompt positions whose log-probabilities have come
    repeated: int = 0  # of these, those that the present engine reports once more
    lives: int = 0
    alternative: int | None = None  # the version that answers, once known: 0 is the adapter asked for
    _offered: tuple[int, ...] = (0,)  # numbers of the versions that the present engine chooses from
    arrived: asyncio.Queue[Token | CoserveError] = field(default_factory=asyncio.Queue)

    @property
    def item(self) -> WorkItem:
        return WorkItem("request", self.request.id)

    @property
    def versions(self) -> tuple[str | None, ...]:
        """Keys of the versions that an engine needs: that of the answer so far, or those of the adapter and
        its alternatives."""
        known = (self.request.adapter, *self.request.alternatives)
        return known if self.alternative is None else (known[self.alternative],)

    def submission(self, is_loaded: Callable[[str], bool]) -> Request:
        """The message for an engine, with the alternatives that it has loaded."""
        request = self.request
        sampling = request.sampling
        if self.tokens:  # the first token came after the whole prompt had been scored
            sampling = replace(sampling, prompt_logprobs=None)
        adapter, *others = self.versions
        there = [(place, key) for place, key in enumerate(others, 1) if key is None or is_loaded(key)]
        self._offered = (self.alternative or 0, *(place for place, _ in there))
        return structs.replace(
            request,
            sampling=sampling,
            adapter=adapter,
            alternatives=tuple(key for _, key in there),
            continued=tuple(self.tokens),
            arrival=request.arrival - time.monotonic(),
        )

    def take(self, token: Token) -> None:
        self.alternative = self._offered[token.alternative]  # another engine goes on with this version
        if token.alternative != self.alternative:
            token = structs.replace(token, alternative=self.alternative)
        if self.repeated and token.prompt_logprobs:
            known = min(self.repeated, len(token.prompt_logprobs))
            self.repeated -= known
            token = structs.replace(token, prompt_logprobs=token.prompt_logprobs.rows(known))
        self.scored += len(token.prompt_logprobs)
        if token.token is not None:
            self.tokens.append(token.token)
        self.lives = 0
        self.arrived.put_nowait(token)
