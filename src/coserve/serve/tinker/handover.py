"""Keeps all that another server needs to go on with a run: its requests, before they are promised, and now
and then its state."""

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from coserve.errors import CoserveError
from coserve.serve.store.durable import link_files, settle
from coserve.serve.store.ids import new_id
from coserve.serve.store.run_log import LoggedRequest
from coserve.serve.store.tinker import LEASED
from coserve.serve.tinker.open_run import OpenRun
from coserve.serve.tinker.sessions import ClientSessions

log = logging.getLogger(__name__)

STEPS: Final = 32  # optimizer steps to repeat, after which a state is kept
BYTES: Final = 16 * 2**20  # of requests to repeat, likewise


class Handover:
    """Keeps what runs have accepted. For one event loop."""

    def __init__(self, sessions: ClientSessions) -> None:
        self._sessions, self._state = sessions, sessions.state
        self._log = sessions.state.store.run_log
        self._tasks = set[asyncio.Task[None]]()
        self.dropping = set[str]()  # runs that have ended, and whose logs are being deleted

    async def accept(self, run: OpenRun, request: LoggedRequest) -> None:
        """Keeps a request of a run. Beyond the bounds all requests go, and nobody can go on with the run
        until its next state. Raises LeaseLost, StateError, and QuotaExceeded where it has no room."""
        own, id = run.backlog, run.row.id
        await self._log.add(run.tenant.id, id, request)
        own.note(request)
        if own.newer is not None and (own.is_full or self._is_read(run, own.newer)):
            await self._trim(run, own.newer)
        if own.is_full:
            await self._log.drop(id)
            own.forget_all()

    async def begin_with(self, run: OpenRun, source: Path, optimizer: bool) -> None:
        """Keeps the state that a run begins with. Raises CoserveError, and OSError."""
        folder = self._folder(run)
        try:
            await asyncio.to_thread(link_files, source, folder)
            await self._log.keep(run.tenant.id, run.row.id, 0, folder, optimizer)
        except (CoserveError, OSError):
            await self._state.store.artifacts.discard(folder)
            raise

    def changed(self, run: OpenRun, is_load: bool) -> None:
        """Notes that an optimizer step, or a load of other weights, was carried out: a state is kept now and
        then, and after each load, whose files may be deleted."""
        own = run.backlog
        own.steps += 1
        is_much = own.steps >= STEPS or own.nbytes >= BYTES or own.missing or is_load
        if is_much and not own.is_keeping and own.newer is None:
            own.is_keeping, own.steps = True, 0
            self._beside(self._keep(run))

    def end(self, id: str) -> None:
        """Deletes what is kept of a run that has ended."""
        self.dropping.add(id)
        self._beside(self._drop(id))

    async def _drop(self, id: str) -> None:
        try:
            await self._log.drop(id)
        except CoserveError as error:  # it goes with its session, or with its age
            log.warning("what is kept of the training run %s is not deleted: %s", id, error)
        finally:
            self.dropping.discard(id)

    async def _keep(self, run: OpenRun) -> None:
        """Has the engine write the run's state, and keeps that. Where this fails requests are kept on."""
        folder, own, is_kept = self._folder(run), run.backlog, False
        partial = folder.with_name(f".{folder.name}")
        try:
            await self._log.check_room(run.tenant.id)  # before the engine writes what would be dropped
            await asyncio.to_thread(partial.mkdir)
            saved = run.trainer.save(partial, True)
            number = own.change  # what is sent after this is not in the state
            await asyncio.to_thread(settle, await saved, folder)
            if number >= own.missing and number != own.refused:
                await self._log.keep(run.tenant.id, run.row.id, number, folder, True)
                is_kept = True
                if own.missing:
                    await self._log.add(run.tenant.id, run.row.id, own.first)
                own.missing, own.newer = 0, number
                if self._is_read(run, number):
                    await self._trim(run, number)
        except (CoserveError, OSError) as error:
            log.warning("a state of the training run %s was not kept: %s", run.row.id, error)
        finally:
            own.is_keeping = False
            for leftover in (partial,) if is_kept else (partial, folder):
                await self._state.store.artifacts.discard(leftover)

    async def _trim(self, run: OpenRun, number: int) -> None:
        await self._log.trim(run.row.id, number)
        run.backlog.begin_with(number)

    def _is_read(self, run: OpenRun, number: int) -> bool:
        """Tells whether the client has all results up to a request's: the others would be computed again from
        the state before."""
        futures = self._sessions.futures
        found = (futures.find(run.tenant.id, f"{run.row.id}:{one}") for one in run.backlog.numbers(number))
        return all(one is None or one.is_read for one in found)

    def _folder(self, run: OpenRun) -> Path:
        """A folder for a state, named by the lease's number: a late owner takes nobody's place."""
        fence = self._state.store.leases.fence(LEASED, run.row.id)
        return self._state.store.tinker_folder(f"{new_id('state')}.{fence}")

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
