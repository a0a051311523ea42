"""What the routes of the dialect share: futures, live sessions, and checks of who owns what."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

from fastapi import Depends, Request

from coserve.serve.errors import ApiError, not_found
from coserve.serve.state import State
from coserve.serve.store.records import Tenant, TinkerSampler, TinkerSession
from coserve.serve.tinker.futures import Futures
from coserve.serve.tinker.links import Links

log = logging.getLogger(__name__)

SILENT_SECONDS: Final = (
    600.0  # without a sign of life from a session's client, which sends one every ten seconds
)
_LOOK_SECONDS: Final = 10.0  # between two looks at which sessions are silent


class Dialect:
    """The dialect's part of a running server, stored in `app.state.tinker`. For one event loop."""

    def __init__(
        self,
        state: State,
        clock: Callable[[], float] = time.monotonic,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self.state, self.clock, self.silent_seconds = state, clock, silent_seconds
        self.futures = Futures(clock=clock)
        self.links = Links()
        self._heard: dict[tuple[str, str], float] = {}  # sessions with work under way: when a client spoke

    async def session(self, tenant: Tenant, id: str) -> TinkerSession:
        """The tenant's session, which may have ended. Raises ApiError 404."""
        found = await self.state.store.tinker_sessions.get(TinkerSession, tenant.id, id)
        if found is None:
            raise not_found(f"There is no session '{id}', or it is not yours.", param="session_id")
        return found

    async def open_session(self, tenant: Tenant, id: str) -> TinkerSession:
        """As `session`, and notes a sign of life. Raises ApiError 410 for one that has ended."""
        found = await self.session(tenant, id)
        if found.finished is not None:
            raise ApiError(410, f"The session '{id}' has ended.", code="session_finished")
        self._heard[tenant.id, id] = self.clock()
        return found

    async def finish(self, tenant: Tenant, id: str, reason: Mapping[str, Any]) -> None:
        """Ends a session: its samples under way are cancelled."""
        await self.state.store.tinker_sessions.finish(tenant.id, id, reason)
        self._heard.pop((tenant.id, id), None)
        for future in self.futures.of(tenant.id, f"{id}:"):
            self.futures.cancel(future, "The session has ended.")

    async def sampler(self, tenant: Tenant, id: str) -> TinkerSampler:
        """The tenant's sampling session. Raises ApiError 404."""
        found = await self.state.store.tinker_sessions.get(TinkerSampler, tenant.id, id)
        if found is None:
            raise not_found(f"There is no sampling session '{id}', or it is not yours.")
        return found


async def _dialect(request: Request) -> Dialect:
    """FastAPI's dependency for `Dialect`; a coroutine, as FastAPI runs others in threads."""
    found: Dialect = request.app.state.tinker
    return found


Tinker = Annotated[Dialect, Depends(_dialect)]
