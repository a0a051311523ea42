"""Requests of training runs, which take their turns by `seq_id`."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from coserve.core.training import AdamParams
from coserve.errors import CoserveError, EngineLost, LeaseLost, Quarantined, RequestError
from coserve.serve.errors import ApiError
from coserve.serve.store.ids import new_id
from coserve.serve.store.records import Tenant, TinkerCheckpoint, TinkerRun, TinkerSampler
from coserve.serve.store.run_log import LoggedRequest
from coserve.serve.store.usage import Used
from coserve.serve.tinker.checkpoints import add_checkpoint, in_use, insistently, trim_temporary
from coserve.serve.tinker.futures import Payload, TinkerFuture, Waiting, Withdrawn
from coserve.serve.tinker.open_run import OpenRun
from coserve.serve.tinker.passes import PassRequest, pass_payload, read_pass
from coserve.serve.tinker.runs import Runs, check_source, elsewhere
from coserve.serve.tinker.schema import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    TinkerBody,
)
from coserve.serve.tinker.sessions import ClientSessions
from coserve.serve.tinker.turns import MOST_WAITING
from coserve.serve.training.watch import TRAINED_TOKEN

T = TypeVar("T")
_FORWARD_TOKEN: Final = 1.0  # of a pass without a way back
_REFUSED: Final = "Refused"  # kind of a logged request that only takes its turn
_PASSES: Final = ("Forward", "ForwardBackward")


class RunRequests:
    """Submits requests of open runs, which are kept first for other servers. For one event loop.

    One that is `again` carried out, at another server or after a restart, is kept already, and charged.
    """

    def __init__(self, sessions: ClientSessions, runs: Runs) -> None:
        self._sessions, self._state, self._runs = sessions, sessions.state, runs
        self._bodies: dict[str, tuple[type[TinkerBody], Any]] = {
            "OptimStep": (OptimStepRequest, self.optim_step),
            "SaveWeights": (SaveWeightsRequest, self.save_state),
            "SaveWeightsForSampler": (SaveWeightsForSamplerRequest, self.save_for_sampler),
            "SaveWeightsExternal": (SaveWeightsExternalRequest, self.save_external),
            "LoadWeights": (LoadWeightsRequest, self.load),
        }
        self._noting = set[asyncio.Task[None]]()

    async def repeat(self, run: OpenRun, request: LoggedRequest) -> None:
        """Has a request carried out again, or only takes its turn where its outcome is known. Raises
        CoserveError."""
        number, outcome = request.number, request.outcome
        if request.kind == _REFUSED:
            run.turns.skip(number)
        elif outcome is not None:

            async def told(_: OpenRun, __: SendInTurn) -> Payload:
                return Payload.of(outcome)

            self._begin(run, number, request.kind, told)
        elif request.kind in _PASSES:
            bodies = self._state.bodies
            read = await bodies.run(run.tenant.id, read_pass, request.data, request.encoding)
            await self.forward(run.tenant, read, request.data, request.encoding, again=True)
        else:
            kind, submit = self._bodies[request.kind]
            await submit(run.tenant, kind.model_validate_json(request.data), again=True)

    async def forward(
        self, tenant: Tenant, request: PassRequest, data: bytes, encoding: str, again: bool = False
    ) -> TinkerFuture:
        """A pass, forward and back unless `forward_only`; `data` is its body."""

        async def pass_through(run: OpenRun, submit: "SendInTurn") -> Payload:
            if request.problem:
                raise ApiError(400, request.problem)
            output = await submit(
                lambda: run.trainer.forward(
                    request.data, request.loss, request.settings, not request.forward_only
                )
            )
            tokens = sum(len(datum.tokens) for datum in request.data)
            price = _FORWARD_TOKEN if request.forward_only else TRAINED_TOKEN
            if not again:
                self._state.queue.charge(tenant, price * tokens)
            if not (request.forward_only or again):
                used = Used(1, trained_tokens=tokens)
                self._state.store.usage.add(tenant.id, run.row.base, "", used)
            return await self._state.bodies.run(tenant.id, pass_payload, output)

        logged = LoggedRequest(request.seq_id, _PASSES[not request.forward_only], encoding, data, None)
        return await self._in_turn(tenant, request.model_id, logged, pass_through, again)

    async def optim_step(self, tenant: Tenant, body: OptimStepRequest, again: bool = False) -> TinkerFuture:
        """A step of the optimizer."""
        asked = body.adam_params.model_dump()
        params = AdamParams(**{**asked, "grad_clip_norm": asked["grad_clip_norm"] or None})

        async def step(run: OpenRun, submit: "SendInTurn") -> Payload:
            metrics = await submit(lambda: run.trainer.optim_step(params), body.seq_id)
            self._runs.handover.changed(run, is_load=False)
            return Payload.of({"type": "optim_step", "metrics": dict(metrics)})

        return await self._in_turn(tenant, body.model_id, _logged("OptimStep", body), step, again)

    async def save_state(self, tenant: Tenant, body: SaveWeightsRequest, again: bool = False) -> TinkerFuture:
        """Saves weights and the optimizer's state."""

        async def save(run: OpenRun, submit: "SendInTurn") -> Payload:
            name = body.path or f"state-{body.seq_id}"
            row = self._checkpoint(run, "weights", name, body.ttl_seconds, body.user_metadata)
            said = {"type": "save_weights", "path": row.tinker_path}
            await self._save(run, row, submit, (body.seq_id, said), state=True, replace=body.overwrite)
            return Payload.of(said)

        return await self._in_turn(tenant, body.model_id, _logged("SaveWeights", body), save, again)

    async def save_for_sampler(
        self, tenant: Tenant, body: SaveWeightsForSamplerRequest, again: bool = False
    ) -> TinkerFuture:
        """Saves weights to sample from; without a name they are temporary, and the reply has a sampling
        session of them."""
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise ApiError(400, "Give either a path or a sampling_session_seq_id.", param="path")

        async def save(run: OpenRun, submit: "SendInTurn") -> Payload:
            name = body.path or f"temporary-{body.seq_id}"
            row = self._checkpoint(run, "sampler_weights", name, body.ttl_seconds, body.user_metadata)
            row.temporary = body.path is None
            said: dict[str, Any] = {"type": "save_weights_for_sampler"}
            if body.path is not None:
                said["path"] = row.tinker_path
                await self._save(run, row, submit, (body.seq_id, said))
                return Payload.of(said)
            # Its server may have ended between the weights and the sampling session.
            await self._save(run, row, submit, replace=again)
            id = f"{run.row.session}:sample:{body.sampling_session_seq_id}"
            sampler = TinkerSampler(id, tenant.id, run.row.session, row.tinker_path, self._now())
            store, said["sampling_session_id"] = self._state.store, id

            async def finish() -> None:
                if not await store.tinker_sessions.add(sampler):
                    there = await store.tinker_sessions.get(TinkerSampler, tenant.id, id)
                    if there is None or there.model != row.tinker_path:
                        raise ApiError(400, f"There is a sampling session '{id}' already.")
                await store.run_log.finish(run.row.id, body.seq_id, said)

            await insistently(finish, self._state.link.patience)
            await trim_temporary(self._state, run.row.session, run.row.id)
            return Payload.of(said)

        return await self._in_turn(tenant, body.model_id, _logged("SaveWeightsForSampler", body), save, again)

    async def save_external(
        self, tenant: Tenant, body: SaveWeightsExternalRequest, again: bool = False
    ) -> TinkerFuture:
        """Saves weights in PEFT's format, for download."""

        async def save(run: OpenRun, submit: "SendInTurn") -> Payload:
            name = body.path or f"external-{body.seq_id}"
            row = self._checkpoint(run, "external_weights", name, body.ttl_seconds, None)
            said = {"type": "save_weights_external", "path": row.tinker_path}
            await self._save(run, row, submit, (body.seq_id, said))
            return Payload.of(said)

        return await self._in_turn(tenant, body.model_id, _logged("SaveWeightsExternal", body), save, again)

    async def load(self, tenant: Tenant, body: LoadWeightsRequest, again: bool = False) -> TinkerFuture:
        """Has a run go on from a checkpoint."""
        if body.model_id is None or body.seq_id is None or body.session_id is not None:
            raise ApiError(400, "Name a model_id with a seq_id, or a session_id with a model_seq_id.")
        id, number = body.model_id, body.seq_id

        async def load(run: OpenRun, submit: "SendInTurn") -> Payload:
            async def take() -> Path:
                async with in_use(self._state, tenant, body.path) as source:
                    check_source(source, body, run.row.base)
                    return await run.trainer.take(self._state.store.folder / source.path)

            own = await insistently(take, self._state.link.patience)
            await submit(lambda: run.trainer.load(own, body.optimizer), number)
            self._runs.handover.changed(run, is_load=True)
            return Payload.of({"type": "load_weights", "path": body.path, "model_id": id})

        return await self._in_turn(tenant, id, _logged("LoadWeights", body), load, again)

    def refused(self, tenant: Tenant, id: str, number: int) -> None:
        """Takes the turn of a request that was refused before it became a future: later ones do not wait for
        it. Does nothing for a run that is not the tenant's, and for a number that a request has."""
        if self._sessions.futures.find(tenant.id, f"{id}:{number}") is None:
            with suppress(ApiError):
                run = self._runs.find(tenant, id)
                if not run.turns.next <= number < run.turns.next + MOST_WAITING:
                    return
                run.turns.skip(number)
                task = asyncio.create_task(self._note_refused(run, number))
                self._noting.add(task)
                task.add_done_callback(self._noting.discard)

    async def _note_refused(self, run: OpenRun, number: int) -> None:
        """Keeps that a request has been refused. Where this fails, another server waits for it for as long as
        for any that does not come."""
        with suppress(CoserveError):
            await self._runs.handover.accept(run, LoggedRequest(number, _REFUSED, "", b"", None))

    async def _in_turn(
        self,
        tenant: Tenant,
        id: str,
        request: LoggedRequest,
        work: "Callable[[OpenRun, SendInTurn], Coroutine[Any, Any, Payload]]",
        again: bool,
    ) -> TinkerFuture:
        """The future of a request of a run. Raises ApiError 404 for a run that is not open, 400 for a number
        whose turn is over and whose result is dropped, and 409 where another server has the run; StateError
        where it cannot be kept now."""
        run = self._runs.find(tenant, id)
        if self._sessions.futures.find(tenant.id, f"{id}:{request.number}") is None:
            run.turns.check(request.number)
            if not again:
                try:
                    await self._runs.handover.accept(run, request)
                except LeaseLost as error:
                    self._runs.withdraw(run)
                    raise elsewhere(id) from error
        return self._begin(run, request.number, request.kind, work)

    def _begin(
        self,
        run: OpenRun,
        number: int,
        kind: str,
        work: "Callable[[OpenRun, SendInTurn], Coroutine[Any, Any, Payload]]",
    ) -> TinkerFuture:
        """The future of a request, whose turn is over once it has been submitted to the engine, or has failed
        before that."""
        name = f"{run.row.id}:{number}"

        async def whole(future: TinkerFuture) -> Payload:
            future.why = lambda: Waiting("active", f"waits for the request with seq_id {run.turns.next}")
            async with run.turns.turn(number):
                self._enter(run, name)
                try:
                    started = _Started(work, run)
                    await started.submitted()
                except BaseException:
                    self._leave(run, name)
                    raise
            future.why = lambda: _why(run, name)
            try:
                return await started.outcome()
            except CoserveError as error:
                raise await self.final(run, error) from error
            finally:
                self._leave(run, name)

        return self._sessions.futures.begin(run.tenant.id, name, kind, whole)

    async def final(self, run: OpenRun, error: CoserveError) -> Exception:
        """A request's error. Where its run has ended, the error names the checkpoint to continue from; one
        that goes on elsewhere is Withdrawn."""
        is_leaving = self._state.draining and isinstance(error, EngineLost)
        if is_leaving or isinstance(error, LeaseLost):
            self._runs.withdraw(run)
        if run.is_withdrawn:
            return Withdrawn()
        is_lost = isinstance(error, EngineLost | Quarantined) and run.trainer.is_over
        return await self._runs.lost(run, error) if is_lost else error

    def _enter(self, run: OpenRun, name: str) -> None:
        run.under_way.append(name)
        self._state.queue.note_job(run.tenant, run.row.id, trains=True)

    def _leave(self, run: OpenRun, name: str) -> None:
        run.under_way.remove(name)
        run.row.used = self._now()
        if not run.under_way:
            self._state.queue.note_job(run.tenant, run.row.id, trains=False)

    def _checkpoint(
        self, run: OpenRun, kind: str, name: str, ttl: int | None, metadata: dict[str, Any] | None
    ) -> TinkerCheckpoint:
        now = self._now()
        return TinkerCheckpoint(
            new_id("tinker"), run.tenant.id, run.row.id, kind, name, Path(), run.row.base, run.row.lora, 0,
            now, expires=None if ttl is None else now + ttl, user_metadata=metadata,
        )  # fmt: skip

    def _now(self) -> int:
        return int(self._state.store.clock())

    async def _save(
        self,
        run: OpenRun,
        row: TinkerCheckpoint,
        submit: "SendInTurn",
        outcome: tuple[int, dict[str, Any]] | None = None,
        state: bool = False,
        replace: bool = False,
    ) -> None:
        """Has the engine write a checkpoint into a folder of its own, and adds its row, with the `outcome`
        of the request with a number."""
        store, patience = self._state.store, self._state.link.patience
        await insistently(lambda: store.tinker_checkpoints.check_room(run.tenant.id), patience)
        staging = store.folder / "tinker" / f".{row.id}"
        try:
            if state:
                await asyncio.to_thread(staging.mkdir)
            written = await submit(lambda: run.trainer.save(staging, state))
            await add_checkpoint(self._state, row, written, False, replace, outcome, patience)
            used = run.row.used
            await insistently(
                lambda: store.tinker_sessions.change(TinkerRun, run.row.id, used=used), patience
            )
        finally:
            await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)


class SendInTurn(Protocol):
    """Sends a command of a request in its turn; `change` is the request's number where it changes weights."""

    def __call__(self, send: Callable[[], Awaitable[T]], change: int = 0) -> Awaitable[T]: ...


class _Started:
    """Work of a request, which runs as a task; `submitted` ends once it has called `submit`, or has ended."""

    def __init__(
        self, work: Callable[[OpenRun, SendInTurn], Coroutine[Any, Any, Payload]], run: OpenRun
    ) -> None:
        self._sent, self._run = asyncio.Event(), run
        self._task = asyncio.create_task(work(run, self._submit))
        self._task.add_done_callback(lambda _: self._sent.set())

    async def submitted(self) -> None:
        try:
            await self._sent.wait()
        except asyncio.CancelledError:
            self._task.cancel()
            raise

    async def outcome(self) -> Payload:
        """The work's result; cancelling this cancels the work."""
        return await self._task

    async def _submit(self, send: Callable[[], Awaitable[T]], change: int = 0) -> T:
        waiting, backlog = send(), self._run.backlog
        backlog.change = change or backlog.change
        self._sent.set()
        try:
            return await waiting
        except RequestError:
            backlog.refused = change or backlog.refused
            raise


def _why(run: OpenRun, name: str) -> Waiting:
    if run.trainer.reason:
        return Waiting("paused_capacity", run.trainer.reason)
    place = run.under_way.index(name) if name in run.under_way else 0
    return Waiting("active", f"{place} requests of the run are before it" if place else None)


def _logged(
    kind: str,
    body: OptimStepRequest
    | SaveWeightsRequest
    | SaveWeightsForSamplerRequest
    | SaveWeightsExternalRequest
    | LoadWeightsRequest,
) -> LoggedRequest:
    """A request as it is kept."""
    assert body.seq_id is not None
    return LoggedRequest(body.seq_id, kind, "", body.model_dump_json(exclude_unset=True).encode(), None)
