"""Requests of training runs, which take their turns by `seq_id`."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from coserve.core.training import AdamParams
from coserve.errors import CoserveError, EngineLost, Quarantined
from coserve.serve.errors import ApiError
from coserve.serve.store.ids import new_id
from coserve.serve.store.records import Tenant, TinkerCheckpoint, TinkerRun, TinkerSampler
from coserve.serve.store.usage import Used
from coserve.serve.tinker.checkpoints import add_checkpoint, in_use, trim_temporary
from coserve.serve.tinker.futures import Payload, TinkerFuture, Waiting
from coserve.serve.tinker.passes import PassRequest, pass_payload
from coserve.serve.tinker.runs import OpenRun, Runs, check_source
from coserve.serve.tinker.schema import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from coserve.serve.tinker.sessions import ClientSessions
from coserve.serve.training.watch import TRAINED_TOKEN

T = TypeVar("T")
_FORWARD_TOKEN: Final = 1.0  # of a pass without a way back


class RunRequests:
    """Submits requests of open runs. For one event loop."""

    def __init__(self, sessions: ClientSessions, runs: Runs) -> None:
        self._sessions, self._state, self._runs = sessions, sessions.state, runs

    def forward(self, tenant: Tenant, request: PassRequest) -> TinkerFuture:
        """A pass, forward and back unless `forward_only`."""

        async def pass_through(run: OpenRun, submit: "Submit") -> Payload:
            if request.problem:
                raise ApiError(400, request.problem)
            output = await submit(
                lambda: run.trainer.forward(
                    request.data, request.loss, request.settings, not request.forward_only
                )
            )
            tokens = sum(len(datum.tokens) for datum in request.data)
            price = _FORWARD_TOKEN if request.forward_only else TRAINED_TOKEN
            self._state.queue.charge(tenant, price * tokens)
            if not request.forward_only:
                used = Used(1, trained_tokens=tokens)
                self._state.store.usage.add(tenant.id, run.row.base, "", used)
            return await self._state.bodies.run(tenant.id, pass_payload, output)

        kind = "Forward" if request.forward_only else "ForwardBackward"
        return self._in_turn(tenant, request.model_id, request.seq_id, kind, pass_through)

    def optim_step(self, tenant: Tenant, body: OptimStepRequest) -> TinkerFuture:
        """A step of the optimizer."""
        asked = body.adam_params.model_dump()
        params = AdamParams(**{**asked, "grad_clip_norm": asked["grad_clip_norm"] or None})

        async def step(run: OpenRun, submit: "Submit") -> Payload:
            metrics = await submit(lambda: run.trainer.optim_step(params))
            return Payload.of({"type": "optim_step", "metrics": dict(metrics)})

        return self._in_turn(tenant, body.model_id, body.seq_id, "OptimStep", step)

    def save_state(self, tenant: Tenant, body: SaveWeightsRequest) -> TinkerFuture:
        """Saves weights and the optimizer's state."""

        async def save(run: OpenRun, submit: "Submit") -> Payload:
            name = body.path or f"state-{body.seq_id}"
            row = self._checkpoint(run, "weights", name, body.ttl_seconds, body.user_metadata)
            await self._save(run, row, submit, state=True, replace=body.overwrite)
            return Payload.of({"type": "save_weights", "path": row.tinker_path})

        return self._in_turn(tenant, body.model_id, body.seq_id, "SaveWeights", save)

    def save_for_sampler(self, tenant: Tenant, body: SaveWeightsForSamplerRequest) -> TinkerFuture:
        """Saves weights to sample from; without a name they are temporary, and the reply has a sampling
        session of them."""
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise ApiError(400, "Give either a path or a sampling_session_seq_id.", param="path")

        async def save(run: OpenRun, submit: "Submit") -> Payload:
            name = body.path or f"temporary-{body.seq_id}"
            row = self._checkpoint(run, "sampler_weights", name, body.ttl_seconds, body.user_metadata)
            row.temporary = body.path is None
            await self._save(run, row, submit)
            said: dict[str, Any] = {"type": "save_weights_for_sampler"}
            if body.path is not None:
                return Payload.of({**said, "path": row.tinker_path})
            id = f"{run.row.session}:sample:{body.sampling_session_seq_id}"
            sampler = TinkerSampler(id, tenant.id, run.row.session, row.tinker_path, self._now())
            if not await self._state.store.tinker_sessions.add(sampler):
                raise ApiError(400, f"There is a sampling session '{id}' already.")
            await trim_temporary(self._state, run.row.session, run.row.id)
            return Payload.of({**said, "sampling_session_id": id})

        return self._in_turn(tenant, body.model_id, body.seq_id, "SaveWeightsForSampler", save)

    def save_external(self, tenant: Tenant, body: SaveWeightsExternalRequest) -> TinkerFuture:
        """Saves weights in PEFT's format, for download."""

        async def save(run: OpenRun, submit: "Submit") -> Payload:
            name = body.path or f"external-{body.seq_id}"
            row = self._checkpoint(run, "external_weights", name, body.ttl_seconds, None)
            await self._save(run, row, submit)
            return Payload.of({"type": "save_weights_external", "path": row.tinker_path})

        return self._in_turn(tenant, body.model_id, body.seq_id, "SaveWeightsExternal", save)

    def load(self, tenant: Tenant, body: LoadWeightsRequest) -> TinkerFuture:
        """Has a run go on from a checkpoint."""
        if body.model_id is None or body.seq_id is None or body.session_id is not None:
            raise ApiError(400, "Name a model_id with a seq_id, or a session_id with a model_seq_id.")
        id = body.model_id

        async def load(run: OpenRun, submit: "Submit") -> Payload:
            async with in_use(self._state, tenant, body.path) as source:
                check_source(source, body, run.row.base)
                own = await run.trainer.take(self._state.store.folder / source.path)
            await submit(lambda: run.trainer.load(own, body.optimizer))
            return Payload.of({"type": "load_weights", "path": body.path, "model_id": id})

        return self._in_turn(tenant, id, body.seq_id, "LoadWeights", load)

    def refused(self, tenant: Tenant, id: str, number: int) -> None:
        """Takes the turn of a request that was refused before it became a future: later ones do not wait for
        it. Does nothing for a run that is not the tenant's, and for a number that a request has."""
        if self._sessions.futures.find(tenant.id, f"{id}:{number}") is None:
            with suppress(ApiError):
                self._runs.find(tenant, id).turns.skip(number)

    def _in_turn(
        self,
        tenant: Tenant,
        id: str,
        number: int,
        kind: str,
        work: "Callable[[OpenRun, Submit], Coroutine[Any, Any, Payload]]",
    ) -> TinkerFuture:
        """The future of a request of a run. Its turn is over once it has been submitted to the engine, or has
        failed before that. Raises ApiError 404 for a run that is not open, 400 for a number whose turn is
        over and whose result is dropped."""
        run = self._runs.find(tenant, id)
        name = f"{id}:{number}"
        if self._sessions.futures.find(tenant.id, name) is None:
            run.turns.check(number)

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
                raise await self._final(run, error) from error
            finally:
                self._leave(run, name)

        return self._sessions.futures.begin(tenant.id, name, kind, whole)

    async def _final(self, run: OpenRun, error: CoserveError) -> CoserveError:
        """A request's error. Where its run has ended, the error names the checkpoint to continue from."""
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
        submit: "Submit",
        state: bool = False,
        replace: bool = False,
    ) -> None:
        """Has the engine write a checkpoint into a folder of its own, and adds its row."""
        store = self._state.store
        await store.tinker_checkpoints.check_room(run.tenant.id)
        staging = store.folder / "tinker" / f".{row.id}"
        try:
            if state:
                await asyncio.to_thread(staging.mkdir)
            written = await submit(lambda: run.trainer.save(staging, state))
            await add_checkpoint(self._state, row, written, replace=replace)
            await store.tinker_sessions.change(TinkerRun, run.row.id, used=run.row.used)
        finally:
            await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)


Submit = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


class _Started:
    """Work of a request, which runs as a task; `submitted` ends once it has called `submit`, or has ended."""

    def __init__(self, work: Callable[[OpenRun, Submit], Coroutine[Any, Any, Payload]], run: OpenRun) -> None:
        self._sent = asyncio.Event()
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

    async def _submit(self, send: Callable[[], Awaitable[T]]) -> T:
        waiting = send()
        self._sent.set()
        return await waiting


def _why(run: OpenRun, name: str) -> Waiting:
    if run.trainer.reason:
        return Waiting("paused_capacity", run.trainer.reason)
    place = run.under_way.index(name) if name in run.under_way else 0
    return Waiting("active", f"{place} requests of the run are before it" if place else None)
