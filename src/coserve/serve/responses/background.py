"""Responses that are made in the background: they outlive their client's connection, and the server."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Final

from fastapi import Depends, Request

from coserve.core.contained import contained
from coserve.errors import CoserveError, EngineLost, LeaseLost
from coserve.serve.errors import ApiError
from coserve.serve.responses.events import ENDED, restored
from coserve.serve.responses.items import read_item
from coserve.serve.responses.schema import ResponseRequest
from coserve.serve.responses.work import ResponseWork, end_in_background, prepared, produced
from coserve.serve.state import State
from coserve.serve.store.leases import LeaseKey
from coserve.serve.store.records import ResponseRecord
from coserve.serve.tasks import cancel

log = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 1.0  # until a full queue, or a database that cannot be written, is tried again


@dataclass(slots=True, eq=False)
class _Run:
    """A response under way. `stored` is the status of its end, once that is stored."""

    tenant: str
    task: asyncio.Task[None]
    work: ResponseWork | None = None
    stored: str | None = None
    is_cancelled: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


class ResponseRuns:
    """All responses of a server that are made in the background; `app.state.responses`. For one event
    loop."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._runs: dict[str, _Run] = {}
        self._counts = Counter[str]()  # by tenant
        state.store.leases.on_renewed.append(self._follow_others)

    def check(self, tenant: str) -> None:
        """Raises ApiError 429 where the tenant has as many under way as may wait."""
        self._state.queue.check(0, self._counts[tenant])

    async def begin(self, work: ResponseWork) -> None:
        """Stores a response, and begins to make it. Raises QuotaExceeded."""
        assert work.row is not None
        await self._state.store.responses.add(work.row, work.items)
        if await self._state.store.leases.claim("response", work.row.id):
            self._start(work.row, work)

    async def resume(self) -> None:
        """Goes on with all that were under way when a server ended."""
        leases = self._state.store.leases
        for row in await self._state.store.responses.unfinished():
            if row.id in self._runs or not await leases.claim("response", row.id):
                continue
            if row.id not in self._runs:  # another turn of this may have been first
                self._start(row, None)

    async def _follow_others(self, lost: Set[LeaseKey]) -> None:
        """Leaves responses that other servers have taken, and takes those that nobody has."""
        for _, id in (key for key in lost if key[0] == "response"):
            if (run := self._runs.get(id)) is not None:
                run.task.cancel()
        await self.resume()
        await self._state.store.leases.release_but("response", self._runs)

    async def body(self, row: ResponseRecord) -> str:
        """A response as it is now, as JSON. Its end is told once it is stored."""
        run = self._runs.get(row.id)
        if run is None or run.work is None:
            return row.body
        if run.work.writer.status not in ENDED:
            return run.work.writer.body.decode()
        await run.over.wait()
        found = await self._state.store.responses.get(row.tenant, row.id)
        return (found or row).body

    async def wait(self, id: str) -> None:
        """Returns once a response is not under way any more."""
        if run := self._runs.get(id):
            await run.over.wait()

    async def cancel(self, row: ResponseRecord) -> None:
        """Ends a response that is under way."""
        run = self._runs.get(row.id)
        if run is None:
            return
        if run.is_cancelled:
            return await self.wait(row.id)
        run.is_cancelled = True
        await cancel(run.task)
        writer = restored(row.body.encode()) if run.work is None else run.work.writer
        try:
            if writer.status not in ENDED:
                writer.cancel()
            # Also waits where its end is being stored.
            run.stored = await end_in_background(self._state, row, writer)
        finally:
            self._ended(row, run)

    async def close(self) -> None:
        """Ends all work; what is unfinished goes on when the server starts again."""
        await cancel(*(run.task for run in self._runs.values()))

    def _start(self, row: ResponseRecord, work: ResponseWork | None) -> None:
        task = asyncio.create_task(self._run(row), name=f"response {row.id}")
        run = self._runs[row.id] = _Run(row.tenant, task, work)
        self._counts[row.tenant] += 1
        task.add_done_callback(lambda _: None if run.is_cancelled else self._ended(row, run))

    def _ended(self, row: ResponseRecord, run: _Run) -> None:
        """Called once for each run, however many have seen its end: so webhooks are told once."""
        del self._runs[row.id]
        run.over.set()
        if run.stored is not None:
            self._state.alert(f"response.{run.stored}", id=row.id)
        self._counts[row.tenant] -= 1
        if not self._counts[row.tenant]:
            del self._counts[row.tenant]

    async def _run(self, row: ResponseRecord) -> None:
        run = self._runs[row.id]
        try:
            while True:
                try:
                    if run.work is None:
                        run.work = await self._again(row)
                    async for _ in produced(self._state, run.work):
                        pass
                    run.stored = run.work.writer.status
                    return
                except LeaseLost as lost:
                    log.warning("%s", lost)
                    return
                except (ApiError, EngineLost) as error:
                    has_room = not isinstance(error, ApiError) or error.status != 429
                    if has_room and (run.work is not None or isinstance(error, ApiError)):
                        raise
                await asyncio.sleep(_AGAIN_SECONDS)
        except Exception as error:
            run.stored = await self._fail(row, run.work, error)

    async def _again(self, row: ResponseRecord) -> ResponseWork:
        """The work of a response that was under way when the server ended."""
        store = self._state.store
        tenant = await store.tenants.get(row.tenant)
        items = await store.responses.inputs(row.id)
        assert row.request is not None and tenant is not None
        body = await self._state.bodies.run(row.tenant, _body_of, row.request, items)
        return await prepared(self._state, tenant, body, row)

    async def _fail(self, row: ResponseRecord, work: ResponseWork | None, error: Exception) -> str | None:
        """Ends a response that cannot be made; one that is complete could not be stored. Returns the status
        that is stored, None where another server has the response."""
        writer = restored(row.body.encode()) if work is None else work.writer
        if writer.status not in ENDED:
            told = error if isinstance(error, ApiError) else ApiError.of(contained(error, "a response"))
            writer.fail(told)
        while True:
            try:
                return await end_in_background(self._state, row, writer)
            except LeaseLost as lost:
                log.warning("%s", lost)
                return None
            except CoserveError as failed:
                log.warning("the response %s cannot be stored now: %s", row.id, failed)
                await asyncio.sleep(_AGAIN_SECONDS)


def _body_of(request: str, items: Sequence[str]) -> ResponseRequest:
    """The body of a request that was stored, with its items."""
    body = ResponseRequest.model_validate_json(request)
    return body.model_copy(update={"input": [read_item(item) for item in items]})


async def _runs_of(request: Request) -> ResponseRuns:
    """FastAPI's dependency for `ResponseRuns`; a coroutine, as FastAPI runs others in threads."""
    found: ResponseRuns = request.app.state.responses
    return found


InBackground = Annotated[ResponseRuns, Depends(_runs_of)]
