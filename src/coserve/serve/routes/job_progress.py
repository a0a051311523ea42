"""`/v1/fine_tuning`: the figures of jobs as they train, and the order of those that wait."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Final, get_args

import msgspec
from fastapi import APIRouter, Query, Response

from coserve.serve.errors import ApiError, error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import WrittenJson, json_reply, written_later
from coserve.serve.http.streams import DONE, EVENT_BEGIN, EVENT_END, EventStream
from coserve.serve.routes.jobs import checkpoint_told, find_job, shown_job
from coserve.serve.schema.jobs import (
    FigureList,
    JobChoices,
    JobList,
    MethodName,
    MoveJob,
    OptimizerSettings,
)
from coserve.serve.state import Shared, State
from coserve.serve.store.records import JobRecord, Tenant

router = APIRouter(route_class=JsonRoute, prefix="/v1/fine_tuning", tags=["Fine-tuning"])
MOST_WATCHED: Final = 16  # jobs that a tenant has told live at once
_MOST_FIGURES: Final = 2000
_LIVE_FIGURES: Final = 600  # of one message: about as many as a chart has room for
_EVERY_SECONDS: Final = 1.0
_watched: Final = Counter[str]()  # by tenant

Step = Annotated[int, Query(ge=0, description="The last step that is known already.")]
Most = Annotated[
    int, Query(ge=2, le=_MOST_FIGURES, description="Fewer at equal distances, if there are more.")
]


@router.get("/choices", responses=error_responses(), summary="List what a job may choose from")
async def list_choices(caller: Caller, state: Shared) -> JobChoices:
    """Bases, training methods, adapter methods and schedules that this server has; adapter methods are known
    once an engine is there."""
    hello = state.link.hello
    return JobChoices(
        models=list(state.catalog.bases),
        methods=list(get_args(MethodName)),
        adapters=[] if hello is None else list(hello.methods),
        schedules=list(get_args(OptimizerSettings.model_fields["schedule"].annotation)),
    )


@router.get("/queue", response_model=JobList, responses=error_responses(), summary="List queued jobs")
async def list_queue(caller: Caller, state: Shared) -> Response:
    """The caller's queued jobs, the next one to begin first."""
    return await _in_order(state, caller)


@router.post(
    "/jobs/{job_id}/move",
    response_model=JobList,
    responses=error_responses(404, 409),
    summary="Move a queued job",
)
async def move_job(job_id: str, body: MoveJob, caller: Caller, state: Shared) -> Response:
    """Lets a queued job begin before another of the caller's. Returns the queue as it is then; turns among
    tenants stay as they were."""
    job = await find_job(state, caller, job_id)
    if body.before is not None:
        await find_job(state, caller, body.before)
    await state.job_controller.reorder(job, body.before)
    return await _in_order(state, caller)


@router.get(
    "/jobs/{job_id}/metrics", responses=error_responses(404), summary="List the figures of a job's steps"
)
async def list_figures(
    job_id: str, caller: Caller, state: Shared, after_step: Step = 0, limit: Most = 500
) -> FigureList:
    """Figures of the optimizer steps in order, for a curve: of a long job at most `limit` of them, at equal
    distances, and the last."""
    job = await find_job(state, caller, job_id)
    found = await state.store.job_history.figures(job.id, after_step, limit)
    return FigureList.model_validate({"data": found})


@router.get(
    "/jobs/{job_id}/live",
    responses={200: {"content": {"text/event-stream": {}}}, **error_responses(404, 429)},
    response_class=Response,
    summary="Watch a job",
)
async def watch_job(job_id: str, caller: Caller, state: Shared, after_step: Step = 0) -> EventStream:
    """Server-sent events: the job, its checkpoints, and the figures of its steps since the event before (or
    `after_step`), at once and then whenever any of these has changed, looked at each second. They end with
    the job, and go on through restarts of the engine."""
    job = await find_job(state, caller, job_id)
    if _watched[caller.id] >= MOST_WATCHED:
        message = f"{MOST_WATCHED} jobs are watched already; close one of these streams."
        raise ApiError(429, message, code="rate_limit_exceeded")
    events = _told_live(state, caller, job, after_step)
    return EventStream(_with_first(await anext(events), events), events)  # it counts from now on


async def _with_first(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for event in events:
        yield event


async def _told_live(state: State, caller: Tenant, job: JobRecord, seen: int) -> AsyncGenerator[bytes, None]:
    _watched[caller.id] += 1
    try:
        before: tuple[Any, ...] | None = None
        while not state.draining:
            found = await state.store.jobs.get(caller.id, job.id)
            if found is None:
                break
            job, seen = found, min(seen, found.step)  # a resumed job repeats steps
            checkpoints = await state.store.job_history.checkpoints(job.id, None, 1000)
            rows = () if checkpoints is None else checkpoints.records
            figures = await state.store.job_history.figures(job.id, seen, _LIVE_FIGURES)
            shown = shown_job(state, job)
            now = (shown, tuple((row.step, row.metrics) for row in rows))
            if figures or now != before:
                told = {
                    "job": shown.model_dump(),
                    "checkpoints": [checkpoint_told(row).model_dump() for row in rows],
                    "metrics": figures,
                }
                yield EVENT_BEGIN + msgspec.json.encode(told) + EVENT_END
            before, seen = now, figures[-1]["step"] if figures else seen
            if job.status.is_final:
                break
            await asyncio.sleep(_EVERY_SECONDS)
        yield DONE
    finally:
        _watched[caller.id] -= 1
        if not _watched[caller.id]:
            del _watched[caller.id]


async def _in_order(state: State, caller: Tenant) -> Response:
    jobs = await state.store.jobs.queue(caller.id)
    shown = [WrittenJson(written_later(shown_job, state, job)) for job in jobs]
    return await json_reply(state.bodies, caller.id, {"object": "list", "data": shown, "has_more": False})
