"""Training runs: each is a session of the engine, which its client opens and closes."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from coserve.errors import CoserveError, EngineLost
from coserve.serve.adapter_registry.catalog import Model
from coserve.serve.errors import ApiError, not_found
from coserve.serve.store.leases import LeaseKey
from coserve.serve.store.records import Tenant, TinkerCheckpoint, TinkerRun, TinkerSession
from coserve.serve.store.run_log import LoggedRequest
from coserve.serve.store.tinker import LEASED
from coserve.serve.tinker.checkpoints import in_use, insistently, readable_checkpoint
from coserve.serve.tinker.futures import Payload, TinkerFuture, Waiting, Withdrawn
from coserve.serve.tinker.handover import Handover
from coserve.serve.tinker.open_run import Backlog, OpenRun
from coserve.serve.tinker.schema import CreateModelRequest, LoadWeightsRequest, LoraConfig
from coserve.serve.tinker.sessions import ClientSessions
from coserve.serve.tinker.trainer import EngineTrainer

DEFAULT_RANK: Final = 32
CREATED: Final = "CreateModel"  # kinds of the requests that make runs
LOADED: Final = "LoadWeights"
_MOMENT: Final = 0.01  # seconds
MOST_LOST: Final = 1024  # failed runs whose reason is kept


class Runs:
    """All open runs of a server, and the reasons for which others ended. For one event loop."""

    def __init__(self, sessions: ClientSessions) -> None:
        self._sessions, self._state = sessions, sessions.state
        self.handover = Handover(sessions)
        # Called with a run that was left by its server, of which this one has the lease now.
        self.on_left: Callable[[Tenant, str], asyncio.Task[None]]
        self._taking: dict[str, asyncio.Task[None]] = {}  # runs that `on_left` brings here
        self._open: dict[tuple[str, str], OpenRun] = {}
        self._opening = set[str]()  # runs that are being made
        self._lost: dict[tuple[str, str], str] = {}  # reasons, the oldest first
        self._state.store.leases.on_renewed.append(self._follow_others)

    def find(self, tenant: Tenant, id: str) -> OpenRun:
        """The tenant's open run. Raises ApiError 404 for one that is not, 400 for one that could not go
        on."""
        found = self._open.get((tenant.id, id))
        if found is not None:
            return found
        if (reason := self._lost.get((tenant.id, id))) is not None:
            raise ApiError(400, reason, param="model_id", code="run_lost")
        raise not_found(
            f"There is no open training run '{id}', or it is not yours; a run ends with its session, and "
            "with unload_model: make a new one from a saved state.",
            param="model_id",
        )

    async def check_here(self, tenant: Tenant, id: str, confirmed: bool = False) -> None:
        """Raises ApiError 409 for a run of the tenant that is open on another server. One whose server is
        gone goes on here; until it does it is 409 too. This server may have lost one without knowing it yet:
        with `confirmed` it looks."""
        if id in self._taking:
            raise elsewhere(id)
        if (tenant.id, id) in self._open:
            if confirmed and not await self._state.store.leases.is_confirmed(LEASED, id):
                raise elsewhere(id)
        elif id not in self._opening:
            await self._follow_left(tenant, id)
        elif self._sessions.futures.find(tenant.id, f"{id}:0") is None:
            raise elsewhere(id)  # asked for here too, and promised by another server, if at all

    async def _follow_left(self, tenant: Tenant, id: str) -> None:
        """As `check_here`, for a run that is not open here."""
        store = self._state.store
        session = await store.tinker_sessions.get(TinkerSession, tenant.id, id.partition(":")[0])
        if session is None or session.finished is not None:
            return
        if id in await store.leases.of_others(LEASED):
            raise elsewhere(id)
        if await store.leases.claim_left(LEASED, id):
            task = self._taking[id] = self.on_left(tenant, id)
            task.add_done_callback(lambda _: self._taking.pop(id))
        # Its server may have renewed the lease between these two looks.
        if id in self._taking or id in await store.leases.of_others(LEASED):
            raise elsewhere(id)

    def reason_lost(self, tenant: Tenant, id: str) -> str | None:
        """The reason for which a run could not go on; None for others."""
        return self._lost.get((tenant.id, id))

    async def _follow_others(self, lost: Set[LeaseKey]) -> None:
        """Withdraws runs that go on at other servers, and gives back the leases of those that are over. One
        that was `lost` may have been taken back since."""
        leases = self._state.store.leases
        taken = {id for kind, id in lost if kind == LEASED and not leases.has(kind, id)}
        for run in [run for run in self._open.values() if run.row.id in taken]:
            self.withdraw(run)
        for id in taken & self._taking.keys():
            self._taking[id].cancel()
        under_way = self._opening | self._taking.keys() | {id for _, id in self._open}
        await leases.release_but(LEASED, under_way | self.handover.dropping)

    def open_runs(self, id: str) -> list[OpenRun]:
        """The open run with this id, if there is one."""
        return [run for run in self._open.values() if run.row.id == id]

    def add(self, run: OpenRun) -> None:
        """Takes a run that was brought here."""
        self._open[run.tenant.id, run.row.id] = run
        self._lost.pop((run.tenant.id, run.row.id), None)

    def used(self, row: TinkerRun) -> int:
        """Time of a run's last request, in Unix seconds."""
        run = self._open.get((row.tenant, row.id))
        return row.used if run is None else run.row.used

    async def create(self, tenant: Tenant, body: CreateModelRequest, again: bool = False) -> TinkerFuture:
        """Makes a run with a fresh adapter, `again` where its server had not begun to. Raises ApiError for a
        base that is not served, and for too many runs."""
        lora = (body.lora_config or LoraConfig(rank=DEFAULT_RANK, seed=None)).model_dump()
        base = self._base(body.base_model)
        id = f"{body.session_id}:train:{body.model_seq_id}"

        async def work(future: TinkerFuture) -> Payload:
            run = await self._begun(
                future, tenant, body.session_id, id, base, lora, body.user_metadata, first
            )
            with self._unless_it_fails(run):
                await run.trainer.opened()
            return Payload.of({"type": "create_model", "model_id": run.row.id})

        first = LoggedRequest(0, CREATED, "", body.model_dump_json(exclude_unset=True).encode(), None)
        await self._sessions.open_session(tenant, body.session_id)
        return await self._made(tenant, id, first, work, again)

    async def create_from(
        self, tenant: Tenant, body: LoadWeightsRequest, again: bool = False
    ) -> TinkerFuture:
        """As `create`, for a run that goes on from a checkpoint. Raises ApiError 404 for one that the tenant
        may not read."""
        if body.session_id is None or body.model_seq_id is None or body.model_id is not None:
            raise ApiError(400, "Name a model_id with a seq_id, or a session_id with a model_seq_id.")
        session, id = body.session_id, f"{body.session_id}:train:{body.model_seq_id}"
        await self._sessions.open_session(tenant, session)
        if body.base_model is not None:
            self._base(body.base_model)

        async def work(future: TinkerFuture) -> Payload:
            patience = self._state.link.patience
            source = await insistently(lambda: readable_checkpoint(self._state, tenant, body.path), patience)
            check_source(source, body, body.base_model or source.base)
            base = self._base(source.base)
            run = await self._begun(future, tenant, session, id, base, source.lora, body.user_metadata, first)

            async def take() -> Path:
                async with in_use(self._state, tenant, body.path):
                    return await run.trainer.take(self._state.store.folder / source.path)

            with self._unless_it_fails(run):
                own = await insistently(take, patience)
                await insistently(lambda: self.handover.begin_with(run, own, body.optimizer), patience)
                await run.trainer.opened()
                await run.trainer.load(own, body.optimizer)
            return Payload.of({"type": "load_weights", "path": body.path, "model_id": run.row.id})

        first = LoggedRequest(0, LOADED, "", body.model_dump_json(exclude_unset=True).encode(), None)
        return await self._made(tenant, id, first, work, again)

    async def _made(
        self,
        tenant: Tenant,
        id: str,
        first: LoggedRequest,
        work: Callable[[TinkerFuture], Coroutine[Any, Any, Payload]],
        again: bool,
    ) -> TinkerFuture:
        """The future of making a run by its request `first`. Its lease, by which other servers know where it
        is, comes before, and the request is kept. Raises ApiError 409 where another server makes it or has
        it."""
        futures, name = self._sessions.futures, f"{id}:0"
        while id in self._opening and futures.find(tenant.id, name) is None:
            await asyncio.sleep(_MOMENT)  # the same request is ahead, with its claim
        if futures.find(tenant.id, name) is not None:
            return futures.begin(tenant.id, name, first.kind, work)
        self._opening.add(id)

        async def made(future: TinkerFuture) -> Payload:
            try:
                return await work(future)
            except Withdrawn:
                raise
            except Exception:
                self.handover.end(id)
                raise
            finally:
                self._opening.discard(id)

        try:
            if not again:  # its server may have ended before it could answer
                await self._follow_left(tenant, id)
            if not await self._state.store.leases.claim(LEASED, id):
                raise elsewhere(id)
            await self._state.store.run_log.add(tenant.id, id, first)
            return futures.begin(tenant.id, name, first.kind, made)
        except BaseException:
            self._opening.discard(id)
            raise

    def unload(self, tenant: Tenant, id: str) -> TinkerFuture:
        """Ends a run."""
        run = self.find(tenant, id)

        async def work(future: TinkerFuture) -> Payload:
            self.close(run)
            while id in self.handover.dropping:  # nobody goes on with a run whose client knows of its end
                await asyncio.sleep(_MOMENT)
            return Payload.of({"type": "unload_model", "model_id": id})

        return self._sessions.futures.begin(tenant.id, f"{id}:unload", "UnloadModel", work)

    def close(self, run: OpenRun) -> None:
        """Ends a run; its requests under way fail."""
        if self._leave(run):
            self.handover.end(run.row.id)

    def withdraw(self, run: OpenRun) -> None:
        """Leaves a run, which goes on at another server, or at this one's next start. Clients that wait for
        results of it here are told to ask again."""
        run.is_withdrawn = True
        run.turns.close()
        self._leave(run)

    def _leave(self, run: OpenRun) -> bool:
        if self._open.pop((run.tenant.id, run.row.id), None) is None:
            return False
        run.trainer.close()
        self._state.queue.note_job(run.tenant, run.row.id, trains=False)
        return True

    async def lost(self, run: OpenRun, error: CoserveError) -> CoserveError:
        """Ends a run that cannot be restored. Returns the error, which names the checkpoint to continue from;
        later requests get it too."""
        self.close(run)
        return type(error)(await self.note_lost(run.tenant.id, run.row.id, str(error)))

    async def note_lost(self, tenant: str, id: str, why: str) -> str:
        """Notes that a run is lost; returns the reason, which names its newest saved state."""
        kept = self._state.store.tinker_checkpoints
        rows, _ = await kept.page(tenant, self._state.store.clock(), id)
        newest = next((row.tinker_path for row in rows if row.kind == "weights"), None)
        remedy = "it has saved no state, so begin anew"
        if newest is not None:
            remedy = f"its newest saved state is {newest}: create_training_client_from_state_with_optimizer"
        reason = self._lost[tenant, id] = f"The training run '{id}' cannot go on: {why}; {remedy}."
        while len(self._lost) > MOST_LOST:
            del self._lost[next(iter(self._lost))]
        return reason

    def close_session(self, tenant: str, session: str) -> None:
        """Ends all runs of a session."""
        for (owner, _), run in list(self._open.items()):
            if owner == tenant and run.row.session == session:
                self.close(run)

    def _base(self, name: str) -> Model:
        """The base of this name. Raises ApiError 404."""
        bases = self._state.catalog.bases
        if (found := bases.get(name)) is None:
            names = " and ".join(f"'{one}'" for one in bases)
            raise not_found(f"This server trains {names}, not '{name}'.", "base_model")
        return found

    async def _begun(
        self,
        future: TinkerFuture,
        tenant: Tenant,
        session: str,
        id: str,
        base: Model,
        lora: dict[str, Any],
        metadata: dict[str, Any] | None,
        first: LoggedRequest,
    ) -> OpenRun:
        """A run whose session opens once there is memory for it."""
        most = self._state.settings.max_jobs_tenant
        if sum(owner == tenant.id for owner, _ in self._open) >= most:
            raise ApiError(429, f"You have {most} open training runs: unload some.", code="quota_exceeded")
        now = int(self._state.store.clock())
        row = TinkerRun(id, tenant.id, session, base.name, lora, now, now, metadata)

        async def add() -> None:
            kept = self._state.store.tinker_sessions
            if not await kept.add(row):  # the reply to this same addition may have been lost
                there = await kept.get(TinkerRun, tenant.id, id)
                if there is None or (there.created, there.lora) != (now, lora):
                    said = f"There was a training run '{id}' before; make one with another number."
                    raise ApiError(400, said)

        await insistently(add, self._state.link.patience)
        trainer = await self.trainer(row)
        run = self._open[tenant.id, id] = OpenRun(row, tenant, trainer, Backlog(first))
        future.why = lambda: Waiting("paused_capacity", trainer.reason) if trainer.reason else Waiting()
        return run

    async def trainer(self, row: TinkerRun) -> EngineTrainer:
        """A session in the engine for a run. Raises ApiError 404 for a base that is not served, and
        CoserveError."""
        base = self._base(row.base)
        await self._state.link.wait_ready(self._state.link.patience)
        spare = self._state.store.folder / "tinker" / f".spare-{row.id.replace(':', '-')}"
        return EngineTrainer(self._state.link, row.id, base.base_id, row.lora, spare)

    @contextmanager
    def _unless_it_fails(self, run: OpenRun) -> Iterator[None]:
        """Context of making a run, which is closed where the context fails: no client knows of it then. One
        that the server's end interrupts is made at its next start, or elsewhere."""
        try:
            yield
        except asyncio.CancelledError:
            self.withdraw(run)
            raise
        except BaseException as error:
            if self._state.draining and isinstance(error, EngineLost):
                self.withdraw(run)
                raise Withdrawn from error
            self.close(run)
            raise


def elsewhere(id: str) -> ApiError:
    """The error for a run of another server. Clients send requests again after it."""
    return ApiError(
        409,
        f"The training run '{id}' is open on another server of this service, or on its way from one: a "
        "router has to send a session's requests to one server, while that lives.",
        param="model_id",
        code="run_elsewhere",
    )


def run_of(future: str) -> str:
    """The id of the run that a future with this id is of."""
    return ":".join(future.split(":")[:3])


def check_source(source: TinkerCheckpoint, body: LoadWeightsRequest, base: str) -> None:
    """Raises ApiError 400 for a checkpoint of another base, or without the optimizer's state that is
    wanted."""
    if source.base != base:
        raise ApiError(400, f"{body.path} is of '{source.base}', and cannot go on as one of '{base}'.")
    if body.optimizer and source.kind != "weights":
        message = f"{body.path} has no state of an optimizer: load it without, or a path of 'weights'."
        raise ApiError(400, message, param="optimizer")
