"""The supervisor (`coserve serve`): keeps the API and an engine alive, with a second engine on standby.

All work that can fail runs in the children. The supervisor holds the lock of the state folder and the
listening socket, restarts dead children, and stops the server in order: first the API (answers finish), then
the engine (jobs are checkpointed). Children that hang are killed and count as dead (`watchdog.py`). If the
supervisor dies, its children end, too.
"""

import asyncio
import os
import signal
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from coserve.errors import ConfigError, CoserveError, ServerError
from coserve.serve.processes.announce import Announcer, url_of
from coserve.serve.processes.claim import Claim, Running, claim_state
from coserve.serve.processes.process import ChildProcess, ProcessEnd
from coserve.serve.processes.restarts import RestartPolicy, Restarts
from coserve.serve.processes.watchdog import LOOK_SECONDS, Watchdog
from coserve.serve.settings import ApiStart, ServerSettings, hot_changes
from coserve.serve.store.durable import sweep_checkpoints
from coserve.serve.store.private import OWNER_ONLY
from coserve.serve.tasks import cancel
from coserve.wire.control import EngineStart, encode_line
from coserve.wire.launch import LOW_PRIORITY, RANKS

BACKLOG = 2048  # connections that wait while the API starts again
CHECKPOINT_SECONDS = 60.0  # beyond the drain, for jobs to write their checkpoints
INTERRUPTED = 130  # what a shell reports after Ctrl-C
NOT_IN_ORDER = 1  # exit status where a child ended abnormally during the stop
_LAUNCH = (sys.executable, "-m", "coserve.wire.launch")


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands of the children. A standby engine imports at low priority, so that it does not slow the server
    down."""

    api: Sequence[str] = (*_LAUNCH, "coserve.serve.main")
    engine: Sequence[str] = (*_LAUNCH, "coserve.engine.process")
    standby: Sequence[str] = (*_LAUNCH, LOW_PRIORITY, "coserve.engine.process")


def serve(
    settings: ServerSettings,
    console: Console,
    commands: Commands = Commands(),
    policy: RestartPolicy = RestartPolicy(),
    read_settings: Callable[[], ServerSettings] | None = None,
) -> int:
    """Serves until a signal ends it, and returns the exit status. SIGHUP has `read_settings` called.

    Raises StateInUse, ConfigError where the address is unavailable, and ServerError where a child cannot be
    started or keeps dying.
    """
    os.umask(OWNER_ONLY)  # of all processes
    with ExitStack() as stack:
        claim = stack.enter_context(claim_state(settings.state))
        listener = stack.enter_context(listen(settings.host, settings.port))
        sweep_checkpoints(settings.state)
        settings.logs.mkdir(exist_ok=True)
        announcer = Announcer(console, settings.logs, settings.log_json)
        stack.callback(announcer.close)
        supervisor = Supervisor(settings, listener, claim, announcer, commands, policy, read_settings)
        return asyncio.run(supervisor.run())


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError where the address is unknown or taken."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no address can have
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host!r}, port {port}: {reason}") from error


class Supervisor:
    """The processes of one server, from start to end."""

    def __init__(
        self,
        settings: ServerSettings,
        listener: socket.socket,
        claim: Claim,
        announcer: Announcer,
        commands: Commands = Commands(),
        policy: RestartPolicy = RestartPolicy(),
        read_settings: Callable[[], ServerSettings] | None = None,
    ) -> None:
        self._read_settings = read_settings
        self._reloading = asyncio.Lock()
        self._settings = settings
        self._listener = listener
        self._claim = claim
        self._out = announcer
        self._commands = commands
        self._policy = policy
        self._children: set[ChildProcess] = set()
        self._api: ChildProcess | None = None
        self._engine: ChildProcess | None = None
        self._spare: ChildProcess | None = None
        self._begun = time.monotonic()
        self._awaited = {"API", "engine"}  # children that have not been ready yet
        self._down_since: dict[str, float] = {}
        self._watchdog = Watchdog(settings.watchdog_seconds)
        self._aborts: set[asyncio.Task[None]] = set()
        self._unfinished: list[str] = []  # children that ended abnormally during the stop
        self._deaths = Counter[str]()  # of children that were replaced, by their names
        self._ready: dict[str, int] = {}  # process ids of children that are ready, by their names
        self._stop = asyncio.Event()
        self._hard_stop = asyncio.Event()

    async def run(self) -> int:
        """Returns 0 after an orderly end, 1 after any other, 130 after a second signal. No child survives."""
        self._listen_to_signals()
        self._note_running()
        self._out.begin(self._settings)
        watching = asyncio.create_task(self._watch())
        try:
            return await self._serve_until_told()
        finally:
            await cancel(watching)
            await self._kill_everything()
            self._settings.socket.unlink(missing_ok=True)

    # Life

    async def _serve_until_told(self) -> int:
        engine = asyncio.create_task(self._keep_engine())
        api = asyncio.create_task(self._keep_api())
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait({engine, api, stop}, return_when=asyncio.FIRST_COMPLETED)
            status = await self._end_in_order(api, engine)
            for keeper in done - {stop}:
                keeper.result()  # keepers end by raising only
            return status
        finally:
            await cancel(engine, api, stop)

    async def _watch(self) -> None:
        """Sends heartbeats to children, and kills those that hang, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for child in self._children:
                child.greet()
            for child, why in self._watchdog.look(self._children):
                self._out.say(
                    f"the {child.name} hangs ({why}): it is ended, and the stacks of its threads are in "
                    f"{child.log}",
                    "yellow",
                )
                task = asyncio.create_task(child.abort(why))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)

    async def _keep_api(self) -> None:
        record = Restarts(self._policy)
        while True:
            self._api = await self._spawn("API", self._commands.api, (self._listener.fileno(),))
            self._api.tell(encode_line(ApiStart(self._settings, self._listener.fileno())))
            await self._live(self._api, record)

    async def _keep_engine(self) -> None:
        settings = self._settings
        _make_private(settings.socket.parent)
        settings.scratch.mkdir(exist_ok=True)
        start = EngineStart(
            model=settings.model,
            socket=str(settings.socket),
            config=replace(settings.engine, scratch=settings.engine.scratch or str(settings.scratch)),
            calibration=str(settings.calibration),
            log_level=settings.log_level,
            log_json=settings.log_json,
            bases=dict(settings.bases),
            stitched={
                name: replace(
                    chain, first=settings.base_id(chain.first), second=settings.base_id(chain.second)
                )
                for name, chain in settings.stitched.items()
            },
        )
        record = Restarts(self._policy)
        crash = ""
        while True:
            self._engine = self._promote() or await self._spawn("engine", self._commands.engine)
            self._engine.tell(encode_line(msgspec.structs.replace(start, crash=crash)))
            end = await self._live(self._engine, record, self._keep_spare if settings.standby else None)
            if not record.failed_starts:  # it had been ready; else the child before it counts
                crash = end.crash
            if self._stop.is_set() and end.code == 0:
                return  # drained by the API, as it should: the next server goes on from there

    def _promote(self) -> ChildProcess | None:
        """The standby engine, if it will be ready sooner than a new one; else None."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        stands_by = spare.name in self._ready
        self._note_down(spare)
        if spare.has_ended:
            return None
        if not stands_by and not spare.hurry():
            spare.kill()
            return None
        spare.name = "engine"
        return spare

    async def _keep_spare(self) -> None:
        """Keeps one standby engine running, until cancelled."""
        record = Restarts(self._policy)
        *command, module = self._commands.standby
        if (ranks := self._settings.engine.ranks) > 1:
            command.append(f"{RANKS}{ranks}")
        while True:
            self._spare = spare = await self._spawn("standby engine", [*command, module])
            stands_by = await spare.status() is not None
            since = time.monotonic()
            if stands_by:
                self._note_up(spare)
            end = await spare.wait()
            self._note_down(spare)
            if self._stop.is_set():
                return
            self._out.say(f"the standby engine ended ({end})", "yellow")
            pause = record.died_after(time.monotonic() - since) if stands_by else record.died_at_start()
            await asyncio.sleep(pause)

    async def _live(
        self,
        child: ChildProcess,
        record: Restarts,
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> ProcessEnd:
        """Follows one child from start to end, and waits before a restart; returns how it ended. `beside`
        runs while the child is ready.

        Raises ServerError if a restart is pointless or exceeds the limit.
        """
        if await self._becomes_ready(child):
            since = time.monotonic()
            self._note_ready(child)
            self._note_up(child)
            task = asyncio.create_task(beside()) if beside is not None else None
            try:
                end = await child.wait()
            finally:
                if task is not None:
                    await cancel(task)
                self._note_down(child)
            self._down_since[child.name] = time.monotonic()
            pause = record.died_after(time.monotonic() - since)
        else:
            end = await child.wait()
            pause = record.died_at_start()
            if record.is_exhausted:
                self._out.quote(child.log.last_lines())
                raise ServerError(
                    f"the {child.name} ended at its start {record.failed_starts} times in a row, "
                    f"at last so: {end}; its log is {child.log}"
                )
        if self._stop.is_set() and end.code == 0:
            return end
        if self._stop.is_set():
            self._note_end(child, end)
        else:
            self._deaths[child.name] += 1
            self._note_running()
        after = f" in {pause:.1f} s" if pause else ""
        self._out.say(
            f"the {child.name} ended ({end}; its log is {child.log}): starting another{after}",
            "yellow",
        )
        await asyncio.sleep(pause)
        return end

    async def _becomes_ready(self, child: ChildProcess) -> bool:
        """Waits for a child to become ready. Raises ServerError if the first start reports a failure, which a
        restart would repeat."""
        while status := await child.status():
            match status.state:
                case "measuring":
                    self._out.say(f"  {child.name:<16}{status.text}")
                case "ready":
                    if status.text and child.name in self._awaited:
                        self._out.say(f"  {child.name:<16}{status.text}")
                    return True
                case "failed" if child.name in self._awaited:
                    raise ServerError(status.text)
                case "crashed" if child.name in self._awaited:
                    raise ServerError(
                        f"the {child.name} failed at its start with {status.text}: that is a bug or a "
                        f"damaged file, and the whole traceback is in {child.log}"
                    )
        return False

    def _note_ready(self, child: ChildProcess) -> None:
        now = time.monotonic()
        if child.name in self._awaited:
            self._awaited.remove(child.name)
            if not self._awaited:
                self._out.ready(self._settings, self._listener, now - self._begun)
        else:
            away = now - self._down_since.get(child.name, self._begun)
            self._out.say(f"the {child.name} is ready again, {away:.1f} s after the last one ended", "green")

    def _note_up(self, child: ChildProcess) -> None:
        self._ready[child.name] = child.pid
        self._note_running()

    def _note_down(self, child: ChildProcess) -> None:
        self._ready.pop(child.name, None)
        self._note_running()

    def _note_running(self) -> None:
        """Records the ids of ready processes."""
        ready = self._ready
        self._claim.note(
            Running(
                pid=os.getpid(),
                url=url_of(self._listener, self._settings.ssl_certfile is not None),
                api=ready.get("API", 0),
                engine=ready.get("engine", 0),
                standby=ready.get("standby engine", 0),
                deaths=dict(self._deaths),
            )
        )

    async def _spawn(self, name: str, command: Sequence[str], pass_fds: Sequence[int] = ()) -> ChildProcess:
        log = self._settings.logs / ("api.log" if name == "API" else "engine.log")
        child = await ChildProcess.start(name, command, log, pass_fds)
        self._children = {child, *(other for other in self._children if not other.has_ended)}
        return child

    # End

    async def _end_in_order(self, api: "asyncio.Task[None]", engine: "asyncio.Task[None]") -> int:
        """Stops the server in order, or at once on a second signal."""
        drained = asyncio.create_task(self._drain(api, engine))
        hard = asyncio.create_task(self._hard_stop.wait())
        await asyncio.wait({drained, hard}, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            self._out.say("stopped at once", "red")
            await cancel(drained, hard)
            return INTERRUPTED
        await cancel(hard)
        drained.result()
        if self._unfinished:
            self._out.say(f"stopped, but not in order: {'; '.join(self._unfinished)}", "red")
            self._out.say("  jobs go on from their last checkpoints when the server is started again")
            return NOT_IN_ORDER
        if self._stop.is_set():  # else an error, reported next, has ended it
            self._out.say("stopped")
        return 0

    async def _drain(self, api: "asyncio.Task[None]", engine: "asyncio.Task[None]") -> None:
        """Drains the API, which needs an engine for its last answers, then the engine."""
        if self._stop.is_set():
            answers = f"running answers have {self._settings.drain_seconds:g} s, jobs write checkpoints"
            self._out.say(f"stopping: {answers} (once more to stop at once)" if self._ready else "stopping")
        await cancel(api)
        if self._api is not None:
            patience = self._settings.drain_seconds + CHECKPOINT_SECONDS
            self._note_end(self._api, await self._api.end(patience))
        await cancel(engine)
        if self._engine is not None:
            self._note_end(self._engine, await self._engine.end(CHECKPOINT_SECONDS))

    def _note_end(self, child: ChildProcess, end: ProcessEnd) -> None:
        """Records a ready child with an abnormal end. A child that hung may still exit with 0, if SIGCONT
        delivers SIGTERM before SIGABRT."""
        if child.beats_itself and (end.code != 0 or end.was_hanging):
            self._unfinished.append(f"the {child.name} ended ({end})")

    async def _kill_everything(self) -> None:
        for child in self._children:
            child.kill()
        await asyncio.gather(*(child.wait() for child in self._children))

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._hear_signal)
        # A terminal that closes sends it, too: the server goes on.
        loop.add_signal_handler(signal.SIGHUP, self._hear_hangup)

    def _hear_hangup(self) -> None:
        task = asyncio.create_task(self._reload())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _reload(self) -> None:
        """Reads the settings again and tells the API those that can change now."""
        async with self._reloading:
            try:
                read = self._read_settings
                settings = self._settings if read is None else await asyncio.to_thread(read)
            except (CoserveError, OSError, ValueError) as error:  # whoever waits for a word has to get one
                self._out.say(f"SIGHUP: nothing is reloaded: {error}", "red")
                return
            changed, cold = hot_changes(self._settings, settings)
            self._settings = replace(self._settings, **changed)
            if self._api is not None:
                self._api.tell(encode_line(self._settings))
            told = f"SIGHUP: reloaded {', '.join(changed) or 'no setting, as none has changed'}"
            if cold:
                told += f"; only a restart changes {', '.join(cold)}"
            self._out.say(told, "yellow" if cold else "")

    def _hear_signal(self) -> None:
        (self._hard_stop if self._stop.is_set() else self._stop).set()


def _make_private(folder: Path) -> None:
    """Makes the folder of the engine's socket. Raises ConfigError if other users could write to it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{folder} belongs to somebody else, or others may write to it: choose another --state"
        )
