"""The API's process, which `coserve.wire.launch` starts.

Its first line in is an `ApiStart`; its lines out are `Status`. SIGTERM drains: no new work, running answers
get `drain_seconds`, jobs write checkpoints and their events are stored. Exit status 0 after that.
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from dataclasses import replace

from coserve.errors import CoserveError, EngineLost
from coserve.serve.app import COMPUTED, create_app, error_shape_of
from coserve.serve.compose import build_state
from coserve.serve.http.connections import ConnectionLimits
from coserve.serve.http.listener import Listener, fastest_loop
from coserve.serve.http.proxies import networks_of
from coserve.serve.http.shedding import LoadShedder
from coserve.serve.settings import ApiStart, ServerSettings, hot_changes
from coserve.serve.state import State
from coserve.wire.child import SILENT_SECONDS, SupervisorPipes
from coserve.wire.control import BEAT_SECONDS, Status, decode_line
from coserve.wire.logs import configure_logs

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = (
    45.0  # for the engine to write checkpoints once all answers have ended; then it ends anyway
)
# That a thread may hold the interpreter while the event loop waits for it: large bodies and replies are read
# and written on threads, and each round of the loop waits once.
SWITCH_SECONDS = 0.001
RECONNECT_SECONDS = 1.0  # for an API that has just started to find the engine that is there
_OTHER_FILES = 512  # beside connections: the database, uploads, the engine's socket


async def serve(start: ApiStart, pipes: SupervisorPipes) -> None:
    """Serves until SIGTERM or SIGINT, and returns after the drain."""
    began = time.monotonic()
    settings = start.settings
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with build_state(settings, settings.socket) as state:
        state.supervisor_silence = lambda: pipes.supervisor_silence
        gc.collect()
        gc.freeze()  # objects so far stay: no garbage collection walks them while streams wait
        limits = ConnectionLimits(
            settings.max_connections,
            settings.max_connections_address,
            settings.stall_seconds,
            proxies=networks_of(settings.trusted_proxies),
        )
        _allow_files(limits.most + _OTHER_FILES)
        shedder = LoadShedder(state.queue, COMPUTED)
        own = socket.socket(fileno=start.listen_fd)
        app = create_app(state)
        await app.state.responses.resume()
        pair = settings.ssl_certfile, settings.ssl_keyfile
        certificate = None if pair[0] is None or pair[1] is None else (pair[0], pair[1])
        listener = Listener(app, own, limits, shedder, error_shape_of, certificate, settings.access_log)
        loop, reload = asyncio.get_running_loop(), Reload(state, listener)
        pipes.on_line = lambda line: loop.call_soon_threadsafe(reload.take, line)
        for line in pipes.early:
            reload.take(line)
        serving = asyncio.create_task(listener.run())
        await listener.started()
        beating = asyncio.create_task(_beat(pipes))
        stopped = asyncio.create_task(stop.wait())
        async with app.state.batches.running():
            pipes.say(Status("ready", seconds=time.monotonic() - began))
            await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not serving.done():
            pipes.say(Status("draining"))
            await drain(state)
            listener.stop()
        await serving
        await app.state.responses.close()
        beating.cancel()


class Reload:
    """Takes over settings that the supervisor has read again, and a renewed certificate."""

    def __init__(self, state: State, listener: Listener) -> None:
        self._state, self._listener = state, listener
        self._noting: asyncio.Task[None] | None = None

    def take(self, line: bytes) -> None:
        """Applies a line with the settings; whatever is wrong with it is logged, and changes nothing."""
        try:
            settings = decode_line(line, ServerSettings)
            changed, _ = hot_changes(self._state.settings, settings)
            self._listener.renew()
        except CoserveError as error:
            log.error("nothing is reloaded: %s", error)
            return
        self._state.change(replace(self._state.settings, **changed))
        logging.getLogger().setLevel(self._state.settings.log_level.upper())
        log.warning("reloaded: %s", ", ".join(changed) or "no setting has changed")
        if changed:
            self._noting = asyncio.create_task(self._note(sorted(changed)))

    async def _note(self, names: list[str]) -> None:
        try:
            await self._state.store.audit.note("limits.reloaded", ", ".join(names))
        except CoserveError as error:
            log.warning("the audit log lacks the reloaded settings: %s", error)


async def _beat(pipes: SupervisorPipes) -> None:
    """Sends heartbeats to the supervisor, and logs when the supervisor is silent."""
    was_silent = said = False
    while True:
        pipes.beat()
        is_silent = pipes.supervisor_silence > SILENT_SECONDS
        if (
            is_silent == was_silent != said
        ):  # seen twice, as after a pause of this process the pipe is read first
            said = is_silent
            _say_supervised(is_silent)
        was_silent = is_silent
        await asyncio.sleep(BEAT_SECONDS)


def _say_supervised(is_silent: bool) -> None:
    if is_silent:
        log.error(
            "the supervisor (process %d) has given no sign of life for %g s: it hangs, or a signal has "
            "stopped it (kill -CONT lets it go on); answers and jobs go on, but nothing that ends is started "
            "again",
            os.getppid(),
            SILENT_SECONDS,
        )
    else:
        log.warning("the supervisor gives signs of life again")


async def drain(state: State) -> None:
    """Refuses new work; waits for answers, then for the engine's jobs to be on disk and in the database."""
    state.draining = True
    state.job_controller.drain()
    try:
        async with asyncio.timeout(state.settings.drain_seconds):
            while state.queue.inside or state.queue.waiting:
                await asyncio.sleep(0.02)
    except TimeoutError:
        log.warning("%d answers did not end in time", state.queue.inside + state.queue.waiting)
        state.link.refuse(EngineLost("the server is shutting down, and this answer took too long"))
    try:
        async with asyncio.timeout(CHECKPOINT_SECONDS):
            await state.link.drain(RECONNECT_SECONDS)
    except TimeoutError:
        log.warning("the engine did not say in time that its jobs are on disk")


def _allow_files(wanted: int) -> None:
    """Raises the limit of open files to `wanted` as far as the system allows: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main(pipes: SupervisorPipes) -> None:
    """Runs the process; deliberate errors become a `failed` status and exit status 1."""
    try:
        start = pipes.start_line(ApiStart)
        sys.setswitchinterval(SWITCH_SECONDS)
        configure_logs("api", start.settings.log_level, start.settings.log_json)
        with asyncio.Runner(loop_factory=fastest_loop()) as runner:
            runner.run(serve(start, pipes))
    except CoserveError as error:
        pipes.say(Status("failed", str(error), kind=type(error).__name__))
        sys.exit(1)
