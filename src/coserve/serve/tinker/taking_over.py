"""Going on with runs whose servers are gone: from the oldest state that is kept, with the requests since."""

import asyncio
import logging
from typing import Final

from coserve.errors import CoserveError, EngineLost, StateError
from coserve.serve.errors import ApiError
from coserve.serve.store.records import Tenant, TinkerRun
from coserve.serve.store.run_log import LoggedRequest, LoggedRun
from coserve.serve.store.tinker import LEASED
from coserve.serve.tinker.checkpoints import in_use
from coserve.serve.tinker.futures import Payload, TinkerFuture
from coserve.serve.tinker.open_run import Backlog, OpenRun
from coserve.serve.tinker.run_requests import RunRequests
from coserve.serve.tinker.runs import CREATED, LOADED, Runs
from coserve.serve.tinker.schema import CreateModelRequest, LoadWeightsRequest
from coserve.serve.tinker.sessions import ClientSessions
from coserve.serve.tinker.turns import MOST_WAITING, Turns

log = logging.getLogger(__name__)
_AGAIN: Final = 1.0  # seconds until the next attempt, while the database or the engine is away
_AT_ONCE: Final = 2  # runs: the requests of one are 64 MiB at most
_MOMENT: Final = 0.01  # seconds


class TakingOver:
    """Brings runs here of which this server has taken the lease. For one event loop."""

    def __init__(self, sessions: ClientSessions, runs: Runs, requests: RunRequests) -> None:
        self._sessions, self._state = sessions, sessions.state
        self._runs, self._requests = runs, requests
        self._turn = asyncio.Semaphore(_AT_ONCE)

    def begin(self, tenant: Tenant, id: str) -> "asyncio.Task[None]":
        """Brings a run here; the task ends once its requests are under way again, or it is lost."""
        return asyncio.create_task(self._bring(tenant, id), name=f"taking-over-{id}")

    async def _bring(self, tenant: Tenant, id: str) -> None:
        while True:
            try:
                async with self._turn:
                    # Of the time when this server had it before: they would stand for what is done again.
                    await self._sessions.futures.forget(tenant.id, f"{id}:")
                    found = await self._state.store.run_log.read(id)
                    if found is None:
                        why = "its server is gone, and had not kept all of it"
                        await self._runs.note_lost(tenant.id, id, why)
                    else:
                        await self._restore(tenant, id, found)
                return
            except (StateError, EngineLost) as error:
                log.warning("the training run %s is not brought here yet: %s", id, error)
                await asyncio.sleep(_AGAIN)
            except (ApiError, CoserveError) as error:
                log.warning("the training run %s cannot be brought here: %s", id, error)
                await self._runs.note_lost(tenant.id, id, f"its server is gone, and here {error}")
                return

    async def _restore(self, tenant: Tenant, id: str, found: LoggedRun) -> None:
        """Opens a run as it was, and has its requests carried out again. Raises ApiError and CoserveError."""
        await self._sessions.open_session(tenant, id.partition(":")[0])
        row = await self._state.store.tinker_sessions.get(TinkerRun, tenant.id, id)
        if row is None:  # its server had not begun to make it
            await self._made_anew(tenant, found.first)
        else:
            run = await self._reopened(tenant, row, found)
            log.warning("the training run %s goes on here, with %d requests", id, len(found.requests))
            try:
                for request in found.requests:
                    while request.number >= run.turns.next + MOST_WAITING and not run.trainer.is_over:
                        await asyncio.sleep(_MOMENT)
                    await self._requests.repeat(run, request)
            except (ApiError, CoserveError):
                self._runs.close(run)
                raise
        if not self._state.store.leases.has(LEASED, id):  # another server has taken it meanwhile
            for run in self._runs.open_runs(id):
                self._runs.withdraw(run)

    async def _made_anew(self, tenant: Tenant, first: LoggedRequest) -> None:
        if first.kind == CREATED:
            await self._runs.create(tenant, CreateModelRequest.model_validate_json(first.data), again=True)
        else:
            body = LoadWeightsRequest.model_validate_json(first.data)
            await self._runs.create_from(tenant, body, again=True)

    async def _reopened(self, tenant: Tenant, row: TinkerRun, found: LoggedRun) -> OpenRun:
        """The run with its oldest state on its way, and the future of its making."""
        trainer = await self._runs.trainer(row)
        try:
            number, own, has_optimizer = 0, None, False
            payload = {"type": "create_model", "model_id": row.id}
            if found.first.kind == LOADED:
                body = LoadWeightsRequest.model_validate_json(found.first.data)
                payload = {"type": "load_weights", "path": body.path, "model_id": row.id}
                if not found.states:
                    async with in_use(self._state, tenant, body.path) as source:
                        own = await trainer.take(self._state.store.folder / source.path)
                        has_optimizer = body.optimizer
            if found.states:
                state = found.states[0]
                folder = await self._state.store.artifacts.get(self._state.store.folder / state.path)
                own = await trainer.take(folder)
                number, has_optimizer = state.number, state.optimizer
            loaded = None if own is None else trainer.load(own, has_optimizer)
        except BaseException:
            trainer.close()
            raise
        run = OpenRun(row, tenant, trainer, Backlog(found.first), Turns(number + 1))
        run.backlog.change = number
        for request in found.requests:
            run.backlog.note(request)
        if len(found.states) > 1:
            run.backlog.newer = found.states[-1].number
        self._runs.add(run)

        async def made(_: TinkerFuture) -> Payload:
            try:
                await trainer.opened()
                if loaded is not None:
                    await loaded
            except CoserveError as error:
                raise await self._requests.final(run, error) from error
            return Payload.of(payload)

        self._sessions.futures.begin(tenant.id, f"{row.id}:0", found.first.kind, made)
        return run
