"""Training sessions under way, which continue across engine restarts."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from coserve.errors import CoserveError, EngineLost, JobError, Quarantined
from coserve.serve.engine.connection import EngineConnection
from coserve.serve.engine.journal import Change, Entry, Journal
from coserve.serve.engine.probation import ALONE_SECONDS, Probation, Verdicts, WorkItem
from coserve.serve.store.durable import link_files
from coserve.wire.codec import decode_commands, encode_commands, pack_command
from coserve.wire.messages import (
    CloseTraining,
    Forward,
    LoadTraining,
    OpenTraining,
    Reply,
    SaveTraining,
    SessionCommand,
    StepOptimizer,
)

MOST_LIVES: Final = 5  # engine deaths that end a session, without a reply to it in between
_DROPPING: Final = ThreadPoolExecutor(1, "dropping")
_OPENING: Final = "waits for memory that other training sessions and jobs have"
_RETURNING: Final = "the engine was started again, and the session is being brought back to where it was"


@dataclass(slots=True, eq=False)
class _Sent:
    """A command without a reply. `is_posted` to the present engine. Of a load `own` is the folder, if that is
    the session's."""

    ref: int
    packed: msgspec.Raw
    is_pass: bool
    own: Path | None
    reply: "asyncio.Future[Reply]"
    is_posted: bool = False


class LiveSession:
    """A training session as its client drives it, on any engine.

    Commands go out in the order of `send`. When an engine ends, the next one opens the session again, repeats
    its journal, and gets the commands that had no reply; so replies come once. A journal may begin with a
    state, whose files are the session's own: it loads only states that it has taken.

    While a suspect of crashes (`probation`) the session returns in its turn. It is over after `close`, or
    with an error: that of a guilty session, or of a state that could not be restored.
    """

    def __init__(self, opening: OpenTraining, spare: Path, sessions: "LiveSessions") -> None:
        """`spare` is a folder for the server's own states of the session, made when needed."""
        self.reason = _OPENING  # why the session is not open; empty while it is
        self.error: CoserveError | None = None  # of a session that is over
        self.lives = 0
        self.item = WorkItem("session", opening.session)
        self.opened: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._opening, self._spare, self._sessions = opening, spare, sessions
        self._journal = Journal()
        self._waiting: dict[int, _Sent] = {}  # by ref, in order
        self._replies = 0  # so far: its progress
        self._kept: tuple[int, Path] | None = None  # ref and folder of the state that the journal begins with
        self._taken = 0  # states so far
        self._connection: EngineConnection | None = None  # of the engine in which it is open
        self._task: asyncio.Task[None] | None = None
        self._is_under_way = False  # registered with `probation`

    # For its client

    def send(self, command: SessionCommand) -> "asyncio.Future[Reply]":
        """Sends a command; its `ref` is set here. The future raises the engine's error, or the session's.
        Raises the error of a session that is over, Quarantined for a pass equal to one that crashed engines,
        and RequestError for a command that cannot be encoded."""
        if self.error is not None:
            raise self.error
        if isinstance(command, Forward) and self._sessions.verdicts.has_passes:
            self._sessions.verdicts.check_pass(pass_key(command, self._opening.base))
        return self._send(command).reply

    async def take(self, folder: Path) -> Path:
        """Takes the files of a state, which the session then keeps even if `folder` is deleted. Returns its
        own folder with them. Raises the error of a session that is over, and JobError where they cannot be
        read."""
        self._taken += 1
        own = self._spare / f"taken-{self._taken}"
        try:
            await asyncio.to_thread(link_files, folder, own)
        except OSError as error:
            raise JobError(f"the saved state cannot be read: {error.strerror}") from error
        if self.error is not None:
            _drop(self._spare)
            raise self.error
        return own

    def close(self) -> None:
        """Ends the session; commands without a reply fail."""
        self.fail(JobError(f"session {self.item.id} was closed"))

    # For `LiveSessions`

    def begin(self, connection: EngineConnection) -> None:
        """Brings the session into an engine that has just connected."""
        if self._journal.is_lost:
            self.fail(
                EngineLost(
                    "the engine was started again, and the session had more data under way than is repeated"
                )
            )
            return
        self._task = asyncio.create_task(self._bring(connection), name=f"session-{self.item.id}")

    def lost(self) -> None:
        """Notes that the engine is gone."""
        self._stop()
        self._is_under_way = False
        self._connection, self.reason = None, _RETURNING if self.opened.done() else _OPENING
        for sent in self._waiting.values():
            sent.is_posted = False
        if self._waiting:
            self.lives += 1
            if self.lives >= MOST_LIVES:
                self.fail(EngineLost(f"{self.lives} engines died under this session without a reply"))

    def fail(self, error: CoserveError) -> None:
        """Ends the session with this error."""
        if self.error is not None:
            return
        self.error, self.reason = error, ""
        self._stop()
        for future in (self.opened, *(sent.reply for sent in self._waiting.values())):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved here, as its waiter may be gone
        self._waiting.clear()
        self._sessions.over(self)
        _drop(self._spare)

    @property
    def key(self) -> int | None:
        """The key of the pass under way, the first without a reply; None where there is none."""
        for sent in self._waiting.values():
            if sent.is_pass:
                (command,) = decode_commands(encode_commands([sent.packed]))
                assert isinstance(command, Forward)
                return pass_key(command, self._opening.base)
        return None

    # Inside

    def _send(self, command: SessionCommand) -> _Sent:
        ref = next(self._sessions.refs)
        packed = pack_command(structs.replace(command, ref=ref))
        change = _change_of(command)
        if change is not None:
            self._journal.add(ref, packed, change)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        own = None
        if isinstance(command, LoadTraining) and Path(command.path).is_relative_to(self._spare):
            own = Path(command.path)
        sent = self._waiting[ref] = _Sent(ref, packed, isinstance(command, Forward), own, future)
        self._post()
        return sent

    def _post(self) -> None:
        """Sends what is to be sent, now or once the session may do something."""
        if self._connection is None or all(sent.is_posted for sent in self._waiting.values()):
            return
        if not self._sessions.probation.is_open(self.item):
            if self._task is None:
                self._task = asyncio.create_task(self._post_in_turn(), name=f"session-{self.item.id}")
            return
        self._enter()
        for sent in self._waiting.values():
            if not sent.is_posted:
                sent.is_posted = True
                self._ask(self._connection, sent)

    async def _post_in_turn(self) -> None:
        await self._sessions.probation.turn(self.item)
        self._task = None
        self._post()

    def _enter(self) -> None:
        """Notes that the engine works on this session; follows its turn at once."""
        if not self._is_under_way:
            self._is_under_way = True
            self._sessions.probation.enter(self.item, self._replies if self.opened.done() else -1)

    def _leave(self) -> None:
        self._is_under_way = False
        self._sessions.probation.left(self.item)

    def _ask(self, connection: EngineConnection, sent: _Sent) -> None:
        asked = connection.ask_packed(sent.ref, sent.packed)
        asked.add_done_callback(lambda reply: self._replied(sent, reply))

    def _replied(self, sent: _Sent, reply: "asyncio.Future[Reply]") -> None:
        error = reply.exception()
        if isinstance(error, ConnectionError) or self._waiting.get(sent.ref) is not sent:
            return  # it is sent to the next engine; or the session is over
        del self._waiting[sent.ref]
        refusal = error if isinstance(error, CoserveError) else None
        self._journal.ended(sent.ref, refusal)
        if sent.own is not None:
            if error is None:
                self._begins_with(sent.ref, sent.own)
            else:
                _drop(sent.own)
        self._replies, self.lives = self._replies + 1, 0
        self._sessions.probation.moved(self.item, self._replies)
        if not self._waiting:
            self._leave()
        if not sent.reply.done():
            if error is None:
                sent.reply.set_result(reply.result())
            else:
                sent.reply.set_exception(error)
                sent.reply.exception()
        if self._journal.wants_state():
            self._keep()

    def _keep(self) -> None:
        """Has the engine write the state into a folder of the server's own, from which the next engine
        continues. Where that fails the journal keeps growing."""
        folder = self._spare / str(self._replies)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        sent = self._send(SaveTraining(0, self.item.id, str(folder), True))

        def written(reply: "asyncio.Future[Reply]") -> None:
            is_old = self._kept is not None and self._kept[0] > sent.ref  # a load followed it
            if self.error is not None or reply.exception() is not None or is_old:
                _drop(folder)
                return
            load = LoadTraining(0, self.item.id, reply.result().said, True)
            self._journal.kept(sent.ref, pack_command(load))
            self._begins_with(sent.ref, folder)

        sent.reply.add_done_callback(written)

    def _begins_with(self, ref: int, folder: Path) -> None:
        """Notes the folder of the state that the journal begins with now, and deletes the one before."""
        if self._kept is not None:
            _drop(self._kept[1])
        self._kept = ref, folder

    async def _bring(self, connection: EngineConnection) -> None:
        """Opens the session, repeats its journal, and sends what waits."""
        try:
            await self._sessions.probation.turn(self.item)
            self._enter()
            opened = await self._open(connection)
            self._sessions.probation.moved(self.item, self._replies)
            for entry in self._journal:
                if entry.ref not in self._waiting:
                    await self._repeat(connection, entry)
        except ConnectionError:
            return  # `lost` follows
        except CoserveError as error:
            if self.opened.done():
                text = f"the engine was started again, and the session could not be brought back: {error}"
                self.fail(EngineLost(text))
            else:
                self.fail(error)
            return
        self._task, self._connection, self.reason = None, connection, ""
        if not self.opened.done():
            self.opened.set_result(opened)
        if not self._waiting:
            self._leave()
        self._post()

    async def _open(self, connection: EngineConnection) -> Reply:
        """Opens the session. One that waits for memory is not on trial, as with a job: it may wait as long as
        other work runs."""
        asked = self._again(connection, self._opening)
        try:
            return await asyncio.wait_for(asyncio.shield(asked), ALONE_SECONDS)
        except TimeoutError:
            self._leave()
        opened = await asked
        self._enter()
        return opened

    async def _repeat(self, connection: EngineConnection, entry: Entry) -> None:
        (command,) = decode_commands(encode_commands([entry.packed]))
        assert isinstance(command, SessionCommand)
        try:
            await self._again(connection, command)
        except CoserveError:
            if not entry.failed:
                raise

    def _again(self, connection: EngineConnection, command: SessionCommand) -> "asyncio.Future[Reply]":
        return connection.ask(structs.replace(command, ref=next(self._sessions.refs)))

    def _stop(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = None


class LiveSessions:
    """All training sessions of a server, by name. For one event loop.

    `refs` numbers commands for all connections of the link: a command keeps its number when it is sent
    again."""

    def __init__(self, probation: Probation, verdicts: Verdicts, refs: Iterator[int]) -> None:
        self.probation, self.verdicts, self.refs = probation, verdicts, refs
        self._open: dict[str, LiveSession] = {}
        self._connection: EngineConnection | None = None

    def __len__(self) -> int:
        return len(self._open)

    def open(self, command: OpenTraining, spare: Path) -> LiveSession:
        """Opens a session, now or in the next engine; `opened` of what is returned has the reply. See
        `LiveSession` about `spare`."""
        if command.session in self._open:
            raise JobError(f"there is a session {command.session!r} already")
        session = self._open[command.session] = LiveSession(command, spare, self)
        if self._connection is not None:
            session.begin(self._connection)
        return session

    def key(self, item: WorkItem) -> int | None:
        """The key of the pass that an item has under way, if it is a session with one."""
        session = self._open.get(item.id) if item.kind == "session" else None
        return None if session is None else session.key

    def condemn(self, item: WorkItem, verdict: Quarantined) -> None:
        """Ends a guilty item, if it is a session."""
        if item.kind == "session" and (session := self._open.get(item.id)) is not None:
            session.fail(verdict)

    def connected(self, connection: EngineConnection) -> None:
        """Brings all sessions into an engine."""
        self._connection = connection
        self._each(lambda session: session.begin(connection))

    def lost(self) -> None:
        """Notes that there is no engine any more."""
        self._connection = None
        self._each(LiveSession.lost)

    def crashed(self) -> None:
        """Notes that the engine ended itself, which `probation` counts."""
        for session in self._open.values():
            session.lives = max(session.lives - 1, 0)

    def give_up(self, error: CoserveError) -> None:
        """Ends all sessions: no engine came back."""
        self._each(lambda session: session.fail(error))

    def over(self, session: LiveSession) -> None:
        """Forgets a session that is over, and has the engine do so."""
        self._open.pop(session.item.id, None)
        self.probation.left(session.item)
        if self._connection is not None:
            self._connection.ask(CloseTraining(next(self.refs), session.item.id))

    def _each(self, call: Callable[[LiveSession], None]) -> None:
        for session in list(self._open.values()):
            call(session)


def pass_key(command: Forward, base: str) -> int:
    """A key that is equal for passes on one base which differ in their session alone."""
    return hash(bytes(pack_command(structs.replace(command, ref=0, session=base))))


def _drop(folder: Path) -> None:
    """Deletes a folder on a thread, after those before it: two threads that delete the same folder leave some
    of it."""
    _DROPPING.submit(shutil.rmtree, folder, ignore_errors=True)


def _change_of(command: SessionCommand) -> Change | None:
    match command:
        case Forward(backward=True):
            return "pass"
        case StepOptimizer():
            return "step"
        case LoadTraining():
            return "load"
    return None
