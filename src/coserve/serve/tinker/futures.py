"""Results that clients fetch later: `retrieve_future` waits for one, and may be repeated.

A future's id follows from the session and the number that the client gave its request, so a request that is
sent twice is one future. Results are kept in memory, bounded in number, bytes and age. A client that asks for
a dropped one gets 410, and sends its request again.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from coserve.errors import CoserveError
from coserve.serve.errors import ApiError
from coserve.serve.tasks import cancel

log = logging.getLogger(__name__)

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]
_OVERHEAD: Final = 1024  # bytes that a future takes beside its payload


@dataclass(frozen=True, slots=True)
class FutureLimits:
    """Bounds of kept futures."""

    most_tenant: int = 4096  # futures of one tenant, under way or kept
    bytes_tenant: int = 64 * 2**20  # of one tenant's results
    bytes_all: int = 512 * 2**20
    seconds: float = 3600.0  # for which an unread result is kept
    seconds_read: float = 120.0  # for which one is kept after it was read, in case the connection broke


class Withdrawn(Exception):
    """Raised by work that goes on at another server: its future is forgotten here, and its client asks
    again."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The reason for which a future is not done, as the client reports it."""

    state: QueueState = "active"
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Payload:
    """A result as it is sent. `as_json` makes the JSON of one in protobuf."""

    body: bytes
    as_json: Callable[[bytes], dict[str, Any]] | None = None

    @classmethod
    def of(cls, value: dict[str, Any]) -> "Payload":
        return cls(json.dumps(value).encode())

    @property
    def is_proto(self) -> bool:
        return self.as_json is not None


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in the client's terms: the request was wrong (user), or the server failed."""

    message: str
    category: Literal["user", "server"]

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """A client's failure for an error."""
        if isinstance(error, CoserveError):
            error = ApiError.of(error)
        if isinstance(error, ApiError):
            return cls(error.message, "user" if error.status < 500 else "server")
        log.error("a request of a tinker client failed", exc_info=error)
        return cls("The server had an error while processing your request.", "server")


@dataclass(eq=False, slots=True)
class TinkerFuture:
    """A request under way, or its outcome."""

    id: str
    tenant: str
    kind: str
    task: asyncio.Task[None] | None = None
    outcome: Payload | Failure | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    why: Callable[[], Waiting] = Waiting
    drop_at: float = float("inf")
    is_read: bool = False  # the client has fetched the outcome

    @property
    def size(self) -> int:
        return _OVERHEAD + (len(self.outcome.body) if isinstance(self.outcome, Payload) else 0)


class Futures:
    """All futures of a server, by tenant. For one event loop."""

    def __init__(
        self, limits: FutureLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits, self._clock = limits or FutureLimits(), clock
        self._of: dict[str, dict[str, TinkerFuture]] = {}
        self._bytes: dict[str, int] = {}

    def begin(
        self, tenant: str, id: str, kind: str, work: Callable[[TinkerFuture], Coroutine[Any, Any, Payload]]
    ) -> TinkerFuture:
        """The future with this id, or a new one whose result is that of `work`.

        Raises ApiError 400 for an id that another kind of request has, and 429 where the tenant has too many
        futures under way.
        """
        known = self.find(tenant, id)
        if known is not None:
            if known.kind != kind:
                raise ApiError(400, f"{id} is a request of the kind {known.kind} already, not {kind}.")
            return known
        self._make_room(tenant)
        future = TinkerFuture(id, tenant, kind)
        self._of.setdefault(tenant, {})[id] = future
        self._bytes[tenant] = self._bytes.get(tenant, 0) + future.size
        future.task = asyncio.create_task(self._run(future, work), name=f"tinker-{id}")
        return future

    def find(self, tenant: str, id: str) -> TinkerFuture | None:
        """A tenant's future that is still kept."""
        found = self._of.get(tenant, {}).get(id)
        if found is not None and found.drop_at <= self._clock():
            self._drop(found)
            return None
        return found

    def of(self, tenant: str, prefix: str) -> list[TinkerFuture]:
        """A tenant's futures whose ids begin so."""
        return [future for id, future in self._of.get(tenant, {}).items() if id.startswith(prefix)]

    async def wait(self, future: TinkerFuture, seconds: float) -> Payload | Failure | None:
        """A future's outcome, None if it has none after `seconds`. Once read it is kept a while longer."""
        try:
            await asyncio.wait_for(future.done.wait(), seconds)
        except TimeoutError:
            return None
        future.drop_at = min(future.drop_at, self._clock() + self.limits.seconds_read)
        return future.outcome

    def cancel(self, future: TinkerFuture, reason: str) -> None:
        """Ends a future's work, if it is under way, with a failure that says why."""
        if future.task is not None and future.outcome is None:
            self._settle(future, Failure(reason, "user"))
            future.task.cancel()

    async def forget(self, tenant: str, prefix: str) -> None:
        """Forgets a tenant's futures whose ids begin so, once their work has ended."""
        if tasks := [one.task for one in self.of(tenant, prefix) if one.task is not None]:
            await asyncio.wait(tasks)
        for future in self.of(tenant, prefix):
            self._drop(future)

    async def close(self) -> None:
        """Cancels all work, and waits for its end."""
        tasks = [one.task for own in self._of.values() for one in own.values() if one.task is not None]
        await cancel(*tasks)

    async def _run(self, future: TinkerFuture, work: Callable[[TinkerFuture], Awaitable[Payload]]) -> None:
        try:
            outcome: Payload | Failure = await work(future)
        except Withdrawn:
            future.task = None
            if future.outcome is None:
                self._drop(future)
                future.done.set()
            return
        except Exception as error:
            outcome = Failure.of(error)
        if future.outcome is None:
            self._settle(future, outcome)
        future.task = None

    def _settle(self, future: TinkerFuture, outcome: Payload | Failure) -> None:
        self._bytes[future.tenant] -= future.size
        future.outcome, future.why = outcome, Waiting
        self._bytes[future.tenant] += future.size
        future.drop_at = self._clock() + self.limits.seconds
        future.done.set()
        self._shrink(future.tenant, self.limits.bytes_tenant)
        while (beyond := sum(self._bytes.values()) - self.limits.bytes_all) > 0:
            largest = max(self._bytes, key=lambda tenant: self._bytes[tenant])
            if not self._shrink(largest, self._bytes[largest] - beyond):
                break

    def _make_room(self, tenant: str) -> None:
        own, now = self._of.get(tenant, {}), self._clock()
        for old in [future for future in own.values() if future.drop_at <= now]:
            self._drop(old)
        if len(own) >= self.limits.most_tenant:
            ended = self._ended(tenant)
            if not ended:
                message = f"You have {len(own)} requests under way; wait until some have ended."
                raise ApiError(429, message, code="rate_limit_exceeded")
            self._drop(ended[0])

    def _shrink(self, tenant: str, most: int) -> bool:
        """Drops results of a tenant until it has `most` bytes, as far as there are some; False if there is
        none."""
        beyond = self._bytes[tenant] - most
        ended = self._ended(tenant) if beyond > 0 else []
        for future in ended:
            if beyond <= 0:
                break
            beyond -= future.size
            self._drop(future)
        return bool(ended)

    def _ended(self, tenant: str) -> list[TinkerFuture]:
        """The tenant's results in the order in which they are dropped: those that were read, then by their
        ends. One sort for all that are dropped: a large result may have thousands of small ones go."""
        ended = [future for future in self._of[tenant].values() if future.outcome is not None]
        return sorted(ended, key=lambda future: future.drop_at)

    def _drop(self, future: TinkerFuture) -> None:
        own = self._of[future.tenant]
        del own[future.id]
        self._bytes[future.tenant] -= future.size
        if not own:
            del self._of[future.tenant], self._bytes[future.tenant]
