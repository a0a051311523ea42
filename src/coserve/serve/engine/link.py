"""The server's end of the engine's socket. Requests survive the crash of an engine."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Final

from msgspec import structs

from coserve.core.request import BASE, Request
from coserve.errors import CoserveError, EngineLost, Quarantined, error_named
from coserve.serve.engine.connection import EngineConnection, LiveRequest
from coserve.serve.engine.live_sessions import LiveSessions
from coserve.serve.engine.news import EngineNews
from coserve.serve.engine.probation import Probation, Verdicts, WorkItem
from coserve.wire.codec import decode_answer
from coserve.wire.frames import read_frame
from coserve.wire.messages import (
    Acknowledge,
    AddAdapter,
    Cancel,
    CheckJob,
    CheckMethod,
    Command,
    Drain,
    EngineStats,
    Hello,
    JobSpec,
    MethodFields,
    PinAdapter,
    PreviewJob,
    RemoveAdapter,
    Reply,
    Report,
    StepSpans,
    Token,
    TraceSteps,
)

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.05  # seconds between two attempts to reach the engine
SILENT_SECONDS = 4.0  # seconds without a report (due every second) after which an engine hangs
MOST_LIVES = 5  # engine deaths that end a request, without a token of it in between
CONNECTING: Final = 1.0  # seconds from an engine's readiness until the link has connected, at most


def why_absent(last: Hello | None) -> str:
    """Tells why no engine is connected, given the Hello of the last one."""
    if last is None:
        return "the engine is starting: it loads the model, and at its first start measures step costs"
    return "the engine ended, and the next one is starting"


class EngineLink:
    """Connects to the engine, reconnects after a crash, and continues live requests on the next engine.

    `run` does the work as a task; it ends only by cancellation, or with an exception that is a bug. All other
    methods may be called from the same event loop. `patience` is the number of seconds that requests wait for
    a missing engine. `news` passes on the engine's messages other than answers; `sessions` are for training.

    Tokens waiting for a slow reader are bounded by its request's `max_tokens`.
    """

    def __init__(self, socket: Path, patience: float = 120.0) -> None:
        self.hello: Hello | None = None  # the newest engine's, kept while there is none
        self.stats: EngineStats | None = None
        self.resident: frozenset[str] = frozenset()  # adapters in memory at the engine's last statistics
        self.connections = 0  # since the start; more than one if an engine died
        self.live: dict[str, LiveRequest] = {}  # requests under way
        self.news = EngineNews(self._acknowledge)
        self.barred: Callable[[str], Awaitable[str | None]] | None = None  # why an adapter is quarantined
        self.bring: Callable[[Path], Awaitable[object]] | None = None  # has an adapter's folder be here
        self.on_load: Callable[[float], None] | None = None  # gets the seconds that loading an adapter took
        self.probation = Probation()
        self._verdicts = Verdicts()
        self._socket, self.patience = socket, patience
        self._connection: EngineConnection | None = None
        self._heard = 0.0  # time of the engine's last message, on `time.monotonic`
        self._connected = asyncio.Event()
        self._refusal: EngineLost | None = None
        self._told_all = asyncio.Event()  # the engine is drained, or gone
        self._is_drained = False  # so the engine ends as it should
        self._refs = count(1)
        self.sessions = LiveSessions(self.probation, self._verdicts, self._refs)

    # For routes

    @property
    def ready(self) -> bool:
        """Tells whether an engine is connected. It may hang: see `silence`."""
        return self._connection is not None

    @property
    def silence(self) -> float:
        """Seconds since the connected engine's last message; infinite without an engine. Beyond
        `SILENT_SECONDS` the engine hangs, or is in a very long step."""
        return math.inf if self._connection is None else time.monotonic() - self._heard

    async def wait_ready(self, timeout: float | None = None) -> Hello:
        """Waits for an engine and returns its Hello. Raises EngineLost after `timeout` seconds."""
        try:
            await asyncio.wait_for(self._connected.wait(), timeout)
        except TimeoutError:
            raise EngineLost(why_absent(self.hello)) from None
        assert self.hello is not None
        return self.hello

    async def generate(
        self, request: Request, folders: Mapping[str, Path] = MappingProxyType({})
    ) -> AsyncGenerator[Token, None]:
        """The tokens of an answer, each once, also across engine crashes. The request has a seed; `folders`
        are those of its adapters, by key.

        Closing the iterator cancels the request in the engine before it returns. Raises the engine's
        CoserveError, or EngineLost.
        """
        if self._refusal is not None:
            raise self._refusal
        self._verdicts.check_request(request)
        live = LiveRequest(request, folders)
        self.live[request.id] = live
        if self._connection is not None:
            self._submit(self._connection, live)
        try:
            while True:
                token = await live.arrived.get()
                if isinstance(token, CoserveError):
                    raise token
                yield token
                if token.finish is not None:
                    return
        finally:
            self._forget(live)

    async def load(self, key: str, path: Path, new: bool = False, base: str = BASE) -> None:
        """Loads an adapter version into the engine, once per engine; the weights of a `new` one are checked.
        `base` is the id of its base. Raises the engine's error."""
        while True:
            await self.wait_ready(self.patience)
            with suppress(ConnectionError):
                return await self._load(self._current(), key, path, new, base)

    async def unload(self, key: str) -> None:
        """Unloads an adapter version from the engine, if there is one."""
        connection = self._connection
        if connection is None or connection.loads.pop(key, None) is None:
            return
        with suppress(ConnectionError):
            await connection.ask(RemoveAdapter(next(self._refs), key))

    async def pin(self, key: str, path: Path, pinned: bool, base: str = BASE) -> None:
        """Pins an adapter version in the engine's memory, or unpins it. `base` is the id of its base. Raises
        the engine's error."""
        while True:
            await self.wait_ready(self.patience)
            with suppress(ConnectionError):
                connection = self._current()
                await self._load(connection, key, path, base=base)
                await connection.ask(PinAdapter(next(self._refs), key, pinned))
                return

    async def check(self, asked: MethodFields | JobSpec | PreviewJob) -> Reply:
        """Has the engine check the settings of an adapter method, or whether a job could ever run: its sites
        and its memory; or look at a job that is not created. Raises the engine's error.

        Retries on the next engine for up to `patience` seconds, unless the check itself crashes engines.
        Raises EngineLost if none completes it.
        """
        item = WorkItem("check", str(next(self._refs)))
        try:
            async with asyncio.timeout(self.patience):
                while True:
                    await self.wait_ready()
                    self._verdicts.check(item)
                    await self.probation.turn(item)
                    with suppress(ConnectionError):
                        connection, ref = self._current(), next(self._refs)
                        self.probation.enter(item)
                        if isinstance(asked, PreviewJob):
                            return await connection.ask(structs.replace(asked, ref=ref))
                        if isinstance(asked, JobSpec):
                            return await connection.ask(CheckJob(ref, asked))
                        return await connection.ask(CheckMethod(ref, asked))
        except TimeoutError:
            raise EngineLost(
                f"the engine did not get to the end of checking this within {self.patience:g} s; nothing "
                "was stored"
            ) from None
        finally:
            self.probation.left(item)

    async def trace(self, seconds: float) -> StepSpans:
        """Has the engine trace its steps for so long. Raises ConflictError where it does already, and
        EngineLost where it dies meanwhile."""
        await self.wait_ready()
        try:
            reply = await self._current().ask(TraceSteps(next(self._refs), seconds))
        except ConnectionError as error:
            raise EngineLost("the engine ended while its steps were traced") from error
        assert reply.spans is not None, "a trace has spans"
        return reply.spans

    def send(self, command: Command) -> None:
        """Sends a command. Without an engine it is dropped: `news.on_connect` is the place to send it
        again."""
        if self._connection is not None:
            self._connection.post(command)

    def refuse(self, error: EngineLost) -> None:
        """Ends every answer with this error, both current and future ones, and all training sessions."""
        self._refusal = error
        self.sessions.give_up(error)
        for live in self.live.values():
            live.arrived.put_nowait(error)

    async def drain(self, reconnect: float) -> None:
        """Has the engine write its jobs' checkpoints; returns when all its messages have been passed on.

        Without an engine it waits up to `reconnect` seconds for one that runs and is not connected yet. The
        checkpoints of a dead engine's jobs are on disk, also of one that dies meanwhile.
        """
        with suppress(EngineLost):
            await self.wait_ready(reconnect)
            self.send(Drain())
            await self._told_all.wait()
        await self.news.settled()

    # The task

    async def run(self) -> None:
        """Connects, reads reports, and reconnects."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.news.run())
            while True:
                try:
                    reader, writer = await self._reach()
                    try:
                        await self._converse(reader, writer)
                    finally:
                        writer.close()
                except (OSError, EOFError) as error:
                    if not self._is_drained:
                        why = "the engine closed it" if isinstance(error, EOFError) else error
                        log.warning("the connection to the engine was lost: %s", why or type(error).__name__)
                    await asyncio.sleep(RETRY_SECONDS)

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        clock = asyncio.get_running_loop().time
        gone = clock()
        while True:
            with suppress(OSError):
                return await asyncio.open_unix_connection(self._socket)
            if clock() - gone > self.patience:
                self._give_up(EngineLost("the engine is gone and did not come back in time"))
            await asyncio.sleep(RETRY_SECONDS)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = decode_answer(await read_frame(reader))
        if not isinstance(hello, Hello):
            raise ConnectionError(f"expected the engine's Hello, got {type(hello).__name__}")
        connection = EngineConnection(hello, writer)
        self._begin(connection)
        try:
            while True:
                report = decode_answer(await read_frame(reader))
                assert isinstance(report, Report), report
                self._take(connection, report)
        finally:
            self._end(connection)

    def _begin(self, connection: EngineConnection) -> None:
        self.connections += 1
        self._heard = time.monotonic()
        self._judge(connection.hello)
        self.hello, self._connection = connection.hello, connection
        self.news.tell(connection.hello)
        self._connected.set()
        self._told_all.clear()
        self._is_drained = False
        for live in list(self.live.values()):
            self._submit(connection, live)
        self.sessions.connected(connection)

    def _end(self, connection: EngineConnection) -> None:
        self._connection, self.stats, self.resident = None, None, frozenset()
        self._connected.clear()
        self._told_all.set()
        connection.end()
        self.sessions.lost()
        for live in list(self.live.values()):
            live.lives += 1
            live.repeated = live.scored
            if live.lives >= MOST_LIVES:
                self._fail(live, EngineLost(f"{live.lives} engines died under this request without a token"))

    def _judge(self, hello: Hello) -> None:
        """Identifies the work that crashed the previous engine, and puts the other work under way on
        probation."""
        is_new = self.hello is not None and self.hello.generation != hello.generation
        if not (is_new and hello.crash):
            self.probation.forget_engine()
            return
        for each in self.live.values():
            each.lives = max(each.lives - 1, 0)  # `probation` counts crashes, `lives` other deaths
        self.sessions.crashed()
        for item in self.probation.crashed():
            live = self.live.get(item.id) if item.kind == "request" else None
            request, key = None if live is None else live.request, self.sessions.key(item)
            found = self._verdicts.find(item, request, hello.crash, key)
            for guilty in found:
                self.news.tell(guilty)
            if live is not None:
                self._fail(live, Quarantined(found[0].reason))
            self.sessions.condemn(item, Quarantined(found[0].reason))

    def _give_up(self, error: EngineLost) -> None:
        for live in list(self.live.values()):
            self._fail(live, error)
        self.sessions.give_up(error)

    # Reports of engines

    def _take(self, connection: EngineConnection, report: Report) -> None:
        self._heard = time.monotonic()
        if report.stats is not None:
            self.stats, self.resident = report.stats, frozenset(report.stats.paging.resident)
        for token in report.tokens:
            if (live := self.live.get(token.id)) is None:
                continue  # cancelled meanwhile
            if token.fault is not None:
                self._fail(live, error_named(token.fault.kind, token.fault.text))
            else:
                live.take(token)
                if token.finish is None:
                    self.probation.moved(live.item, len(live.tokens))
                else:
                    del self.live[token.id]
                    self.probation.left(live.item)
        for reply in report.replies:
            connection.take(reply)
        for numbered in report.jobs:
            self.news.tell((connection.hello.generation, numbered))
        if report.drained:
            self._is_drained = True
            self._told_all.set()

    def _acknowledge(self, generation: str, number: int) -> None:
        if self._connection is not None and self._connection.hello.generation == generation:
            self.send(Acknowledge(number))

    # Commands to engines

    def _submit(self, connection: EngineConnection, live: LiveRequest) -> None:
        request = live.request
        is_loaded = all(key is None or connection.is_loaded(key) for key in live.versions)
        if is_loaded and self.probation.is_open(live.item):
            self._post_request(connection, live)
            return
        task = asyncio.create_task(self._submit_in_turn(connection, live))
        connection.submitters[request.id] = task
        task.add_done_callback(lambda _: connection.submitters.pop(request.id, None))

    def _post_request(self, connection: EngineConnection, live: LiveRequest) -> None:
        self.probation.enter(live.item, len(live.tokens))
        try:
            connection.post(live.submission(connection.is_loaded))
        except CoserveError as error:
            self._fail(live, error)

    async def _submit_in_turn(self, connection: EngineConnection, live: LiveRequest) -> None:
        """Submits a request once its adapter is loaded and, if the request is a suspect, its trial begins.
        Alternatives that cannot be loaded are not offered to the engine."""
        request = live.request
        try:
            for place, key in enumerate(live.versions):
                if key is None or (folder := live.folders.get(key)) is None:
                    continue
                try:
                    await self._load(connection, key, folder, base=request.base)
                except CoserveError:
                    if not place:  # it is the adapter that was asked for, or the answer's so far
                        raise
            await self.probation.turn(live.item)
        except CoserveError as error:
            self._fail(live, error)
        except ConnectionError:
            pass  # submitted again to the next engine
        else:
            if request.id in self.live:
                self._post_request(connection, live)

    async def _load(
        self, connection: EngineConnection, key: str, path: Path, new: bool = False, base: str = BASE
    ) -> None:
        item, began = WorkItem("adapter", key), time.monotonic()
        if key not in connection.loads:
            self._verdicts.check(item)
            if self.barred is not None and (reason := await self.barred(key)) is not None:
                raise Quarantined(reason)
            if self.bring is not None:
                await self.bring(path)
            await self.probation.turn(item)
        if connection is not self._connection:
            raise ConnectionError("the engine died")
        if key not in connection.loads:
            self.probation.enter(item)
            command = AddAdapter(next(self._refs), key, str(path), new, base)
            connection.loads[key] = connection.ask(command)
            connection.loads[key].add_done_callback(lambda load: self._replied(item, load))
            if self.on_load is not None:
                connection.loads[key].add_done_callback(self._timed(began))
        try:
            await asyncio.shield(connection.loads[key])
        except CoserveError:
            connection.loads.pop(key, None)  # the folder may be repaired before the next attempt
            raise

    def _replied(self, item: WorkItem, reply: "asyncio.Future[Reply]") -> None:
        if not isinstance(reply.exception(), ConnectionError):
            self.probation.left(item)

    def _timed(self, began: float) -> "Callable[[asyncio.Future[Reply]], None]":
        def loaded(reply: "asyncio.Future[Reply]") -> None:
            if reply.exception() is None and self.on_load is not None:
                self.on_load(time.monotonic() - began)

        return loaded

    def _current(self) -> EngineConnection:
        if self._connection is None:
            raise ConnectionError("the engine died")
        return self._connection

    def _fail(self, live: LiveRequest, error: CoserveError) -> None:
        if self.live.pop(live.request.id, None) is not None:
            self.probation.left(live.item)
            live.arrived.put_nowait(error)

    def _forget(self, live: LiveRequest) -> None:
        if self.live.get(live.request.id) is not live:
            return
        del self.live[live.request.id]
        self.probation.left(live.item)
        connection = self._connection
        if connection is None:
            return
        submitter = connection.submitters.get(live.request.id)
        if submitter is not None:
            submitter.cancel()  # its adapter is still being loaded
        else:
            connection.post(Cancel(live.request.id))
