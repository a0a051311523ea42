"""Sessions of clients: their owners, and the time of each one's last sign of life."""

import time
from collections.abc import Callable
from typing import Final

from coserve.serve.errors import ApiError, not_found
from coserve.serve.state import State
from coserve.serve.store.records import Tenant, TinkerSampler, TinkerSession
from coserve.serve.tinker.futures import Futures

# Without a sign of life from a session's client, which sends one every ten seconds.
SILENT_SECONDS: Final = 600.0


class ClientSessions:
    """All sessions and the futures of their requests. For one event loop."""

    def __init__(self, state: State, clock: Callable[[], float] = time.monotonic) -> None:
        self.state, self._clock = state, clock
        self.futures = Futures(clock=clock)
        self._heard: dict[tuple[str, str], float] = {}  # time of the last sign of life, by tenant and session

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
        self._heard[tenant.id, id] = self._clock()
        return found

    async def sampler(self, tenant: Tenant, id: str) -> TinkerSampler:
        """The tenant's sampling session. Raises ApiError 404."""
        found = await self.state.store.tinker_sessions.get(TinkerSampler, tenant.id, id)
        if found is None:
            raise not_found(f"There is no sampling session '{id}', or it is not yours.")
        return found

    def __len__(self) -> int:
        """ClientSessions that have given signs of life."""
        return len(self._heard)

    def silent(self, seconds: float) -> list[tuple[str, str]]:
        """Tenants and sessions without a sign of life for so long."""
        now = self._clock()
        return [session for session, heard in self._heard.items() if now - heard >= seconds]

    def forget(self, tenant: str, id: str, reason: str) -> None:
        """Cancels the work under way for a session."""
        self._heard.pop((tenant, id), None)
        for future in self.futures.of(tenant, f"{id}:"):
            self.futures.cancel(future, reason)
