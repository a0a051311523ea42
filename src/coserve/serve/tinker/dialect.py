"""The dialect's part of a running server, and the end of sessions."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

from fastapi import Depends, Request

from coserve.core.contained import contained
from coserve.serve.state import State
from coserve.serve.store.records import Tenant, TinkerSession
from coserve.serve.tinker.checkpoints import delete_unused
from coserve.serve.tinker.links import Links
from coserve.serve.tinker.run_requests import RunRequests
from coserve.serve.tinker.runs import Runs
from coserve.serve.tinker.sessions import SILENT_SECONDS, ClientSessions
from coserve.serve.tinker.taking_over import TakingOver

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 10.0  # between two looks at silent sessions and expired checkpoints


class Dialect:
    """Stored in `app.state.tinker`. For one event loop."""

    def __init__(self, state: State, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = state
        self.sessions = ClientSessions(state, clock)
        self.runs = Runs(self.sessions)
        self.requests = RunRequests(self.sessions, self.runs)
        self._taking_over = TakingOver(self.sessions, self.runs, self.requests)
        self.runs.on_left = self._take_over
        self.links = Links()
        self.look_seconds, self.silent_seconds = _LOOK_SECONDS, SILENT_SECONDS
        self._watching: asyncio.Task[None] | None = None

    async def begin(self, session: TinkerSession) -> None:
        """Adds a session."""
        await self.state.store.tinker_sessions.add(session)
        self.watch()

    def watch(self) -> None:
        """Has sessions that fall silent end from now on: those that another server began too."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="tinker-sessions")

    def _take_over(self, tenant: Tenant, run: str) -> "asyncio.Task[None]":
        """Has a run go on here that its server has left."""
        self.watch()
        return self._taking_over.begin(tenant, run)

    async def finish(self, tenant: Tenant, id: str, reason: Mapping[str, Any]) -> None:
        """Ends a session for the reason that its client gives."""
        await self.state.store.tinker_sessions.finish(tenant.id, id, reason)
        await self._end(tenant.id, id, "The session has ended.")

    async def _end(self, tenant: str, id: str, reason: str) -> None:
        """Ends what a session has under way, and deletes its temporary weights; those in use expire."""
        self.sessions.forget(tenant, id, reason)
        self.runs.close_session(tenant, id)
        checkpoints = self.state.store.tinker_checkpoints
        await delete_unused(self.state, await checkpoints.temporary(id))
        for row in await checkpoints.temporary(id):
            await checkpoints.change(row.id, expires=int(self.state.store.clock()))

    async def _watch(self) -> None:
        """Ends silent sessions and deletes expired checkpoints; never returns."""
        while True:
            await asyncio.sleep(self.look_seconds)
            try:
                for tenant, id in self.sessions.silent(self.silent_seconds):
                    await self._end(tenant, id, "The session's client gave no signs of life.")
                outdated = await self.state.store.tinker_checkpoints.outdated(self.state.store.clock())
                await delete_unused(self.state, outdated)
            except Exception as error:  # such as a full disk: the next look tries again
                log.warning("sessions could not be looked after: %s", contained(error, "sessions"))


async def _dialect(request: Request) -> Dialect:
    """FastAPI's dependency for `Dialect`; a coroutine, as FastAPI runs others in threads."""
    found: Dialect = request.app.state.tinker
    return found


Tinker = Annotated[Dialect, Depends(_dialect)]
