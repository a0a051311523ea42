"""`/v1/fine_tuning`: OpenAI's fine-tuning API, and the validation of jobs."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from coserve.core.job_status import JobStatus
from coserve.errors import (
    AdapterError,
    ConfigError,
    CoserveError,
    DataError,
    ValidationDataError,
    error_named,
)
from coserve.serve.adapter_registry.catalog import Model
from coserve.serve.answering.structure import Structure
from coserve.serve.engine.link import CONNECTING
from coserve.serve.errors import ApiError, error_responses, not_found
from coserve.serve.http.auth import Caller
from coserve.serve.http.idempotency import KEYED
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.pages import page_reply
from coserve.serve.routes.files import find_file
from coserve.serve.routes.job_bodies import checkpoint_interval, configuration_of, method_used, recipe_of
from coserve.serve.schema.common import MOST_METADATA
from coserve.serve.schema.jobs import (
    MOST_SEED,
    CheckpointList,
    CheckpointObject,
    EventList,
    EventObject,
    JobList,
    JobObject,
    JobRequest,
    JobValidation,
)
from coserve.serve.state import Shared, State
from coserve.serve.store.ids import new_id, tail_of
from coserve.serve.store.records import CheckpointRecord, Event, File, JobRecord, Tenant
from coserve.serve.training.origins import origins_of
from coserve.serve.training.specs import of_engine, spec_of
from coserve.serve.training.told import told_preview
from coserve.train.grading.asking import models_asked
from coserve.train.objectives import Reinforcement, objective_of
from coserve.wire.messages import MOST_SHOWN, JobPreview, MethodFields, PreviewJob

router = APIRouter(route_class=JsonRoute, prefix="/v1/fine_tuning", tags=["Fine-tuning"])
_NAMED = 8  # characters of a job's id in its adapter's name

After = Annotated[str | None, Query(description="The last one of the page before.")]
Limit = Annotated[int, Query(ge=1, le=1000)]
Show = Annotated[int, Query(ge=0, le=MOST_SHOWN, description="Examples that are told token by token.")]
Status = Annotated[JobStatus | None, Query(description="Keeps jobs that have it.")]


@router.post(
    "/jobs", responses=error_responses(404, 409, 422), openapi_extra=KEYED, summary="Create a fine-tuning job"
)
async def create_job(body: JobRequest, caller: Caller, state: Shared) -> JobObject:
    """Trains an adapter on an uploaded file.

    "auto" hyperparameters follow the number of examples and the width of the model.
    """
    job, _, model, teacher = await _asked(state, caller, body)
    await state.store.jobs.check_room(caller.id)  # before the engine checks it; counted again later
    async with origins_of(state.catalog, state.store, job, model, teacher):
        async with state.checks.of(caller.id):
            await _check_job(state, job)
        job = await state.job_controller.submit(job)
    for text, level in _notes(state, body, model):
        await state.store.jobs.note(job.id, text, level)
    return shown_job(state, job)


@router.post("/validate", responses=error_responses(404, 409), summary="Check a job's data")
async def validate_job(body: JobRequest, caller: Caller, state: Shared, show: Show = 0) -> JobValidation:
    """Tells what a job with this body would be, and for what reason it would be refused. Nothing is
    created. With `show` the first examples are told token by token, those that are trained and the others."""
    job, training, *models = await _asked(state, caller, body)
    with ExitStack() as used:
        for model in filter(None, models):
            used.enter_context(state.catalog.use(model))
        async with state.checks.of(caller.id):
            spec = await spec_of(state.store, job, state.settings.base_id(job.base))
            if not spec.data or spec.validation == "":
                raise not_found(
                    "A file was deleted a moment ago.", param="training_file", code="file_not_found"
                )
            reply = await state.link.check(PreviewJob(0, spec, training.examples, show))
    preview = reply.preview or JobPreview()
    refusal = None
    if preview.fault is not None:
        refusal = _refusal(error_named(preview.fault.kind, preview.fault.text))
    return _validation(job, training, preview, refusal)


async def _asked(
    state: State, caller: Tenant, body: JobRequest
) -> tuple[JobRecord, File, Model, Model | None]:
    """The job that a body asks for, which is not created yet, with its file, its model and its teacher.
    Raises ApiError for what can be told without reading the file."""
    engine = state.link.hello or await state.link.wait_ready(CONNECTING)
    model = await state.catalog.find(caller, body.model)
    training = await _training_file(state, caller, body.training_file, "training_file")
    if body.validation_file is not None:
        await _training_file(state, caller, body.validation_file, "validation_file")
    seed = secrets.randbelow(MOST_SEED + 1) if body.seed is None else body.seed
    width = engine.of(model.base_id).width
    recipe = recipe_of(body, training.examples or 1, width, seed, continues=model.adapter is not None)
    teacher = None
    if (objective := recipe.options.get("objective")) is not None:
        await _check_objective(state, caller, objective, model)
        teacher = await _teacher(state, caller, objective, model)
        if teacher is not None and teacher.key is not None:
            recipe.options["teacher"] = teacher.key
    if body.peft is not None:
        await _check_method(state, body.peft)
    id = new_id("ftjob")
    job = JobRecord(
        id=id,
        tenant=caller.id,
        status=JobStatus.QUEUED,
        model=model.name if state.catalog.alias_of(body.model) else body.model,
        name=_name_of(model, caller, body.suffix, id),
        base=model.base,
        created=int(state.store.clock()),
        training_file=training.id,
        validation_file=body.validation_file,
        seed=seed,
        every=checkpoint_interval(recipe, training.examples or 1, state.settings.checkpoint_steps),
        hyperparameters=recipe.hyperparameters,
        options=recipe.options,
        peft=body.peft,
        optimizer=None if body.optimizer is None else body.optimizer.model_dump(exclude_unset=True),
        suffix=body.suffix,
        labels=body.metadata,
        start_from=model.key,
        integrations=[one.model_dump() for one in body.integrations or ()] or None,
    )
    return job, training, model, teacher


async def _check_job(state: State, job: JobRecord) -> None:
    """Raises ApiError 400 where the base lacks a job's targets, the beginning of a file is not what its
    method learns from, or the job exceeds all memory, and EngineLost where no engine can check: a stored job
    would start with every engine."""
    spec = await spec_of(state.store, job, state.settings.base_id(job.base))
    if not spec.data or spec.validation == "":
        return  # a file was deleted a moment ago, which is told when the job is added
    try:
        await state.link.check(spec)
    except (DataError, AdapterError, ConfigError) as error:
        raise _refusal(error) from error


async def _check_objective(state: State, caller: Tenant, objective: dict[str, Any], pupil: Model) -> None:
    """Checks the settings of a training method, and adds the grammar of its response format. Raises ApiError
    400 for those that cannot be used, such as a grader's, and 404 for the name of an unknown model."""
    if (wanted := objective.get("response_format")) is not None:
        schema = wanted["json_schema"].get("schema", {})
        form, lark = Structure("json", schema), state.text.markups.lark()
        objective["grammar"] = await state.prompts.run(caller.id, form.grammar, lark)
    hosts = state.settings.engine.grader_hosts
    try:
        aim = await state.prompts.run(caller.id, objective_of, of_engine(objective), hosts)
    except ConfigError as error:
        raise ApiError(400, str(error), param="method", code="invalid_value") from error
    for name in sorted(models_asked(aim.grader) if isinstance(aim, Reinforcement) else ()):
        found = await state.catalog.find(caller, name)
        if found.key is not None or found.base != pupil.base:
            message = (
                f"In a job the base grades answers ('{pupil.base}'), and '{name}' is another model; "
                "graders/run and evals ask any of yours."
            )
            raise ApiError(400, message, param="method.reinforcement.grader.model", code="invalid_value")


def _notes(state: State, body: JobRequest, model: Model) -> Iterator[tuple[str, str]]:
    """Events, with their level, that tell of a job what is done otherwise than its body says."""
    if state.catalog.alias_of(body.model):
        yield f"The model '{body.model}' stands for '{model.name}' on this server", "info"
    if body.integrations and "wandb" in state.settings.report_to:
        project = state.settings.report_project
        yield (
            f"The operator reports jobs to wandb, in the project '{project}'; integrations change nothing",
            "info",
        )
    elif body.integrations:
        yield "This server reports to no wandb: the job trains without its integrations", "warn"
    settings = body.method.settings if body.method else None
    hyperparameters = settings.hyperparameters if settings else None
    if (samples := getattr(hyperparameters, "eval_samples", "auto")) not in ("auto", 1):
        yield (
            f"{samples} eval_samples are not used: validations have one greedy answer to each prompt",
            "warn",
        )
    effort = getattr(hyperparameters, "reasoning_effort", "default")
    if effort != "default":
        yield f"The reasoning_effort '{effort}' is not used: prompts are rendered without one", "warn"


async def _teacher(state: State, caller: Tenant, objective: dict[str, Any], pupil: Model) -> Model | None:
    """The teacher of a distillation; None for other objectives. Raises ApiError 404 for a model that the
    tenant does not have, and 400 for one of another base."""
    if (name := objective.get("teacher")) is None:
        return None
    param = "method.distillation.teacher"
    try:
        found = await state.catalog.find(caller, name)
    except ApiError as error:
        error.param = param
        raise
    if found.base != pupil.base:
        message = f"'{name}' is a model of '{found.base}', and cannot teach one of '{pupil.base}'."
        raise ApiError(400, message, param=param, code="invalid_value")
    return found


async def _check_method(state: State, peft: MethodFields) -> None:
    """Raises ApiError 400 for invalid settings of an adapter method."""
    try:
        await state.link.check(peft)
    except (AdapterError, ConfigError) as error:
        raise _refusal(error) from error


def _refusal(error: CoserveError) -> ApiError:
    """The answer to a job that the engine refuses for this error."""
    if isinstance(error, DataError):
        param = "validation_file" if isinstance(error, ValidationDataError) else "training_file"
        return ApiError(400, str(error), param=param, code=f"invalid_{param}")
    if isinstance(error, AdapterError | ConfigError):
        return ApiError(400, str(error), param="peft", code="invalid_value")
    return ApiError.of(error)


@router.get("/jobs", response_model=JobList, responses=error_responses(), summary="List fine-tuning jobs")
async def list_jobs(
    request: Request,
    caller: Caller,
    state: Shared,
    after: After = None,
    limit: Limit = 20,
    status: Status = None,
) -> Response:
    """The caller's jobs, the newest first; `metadata[key]=value` keeps those that carry this pair, and
    `metadata=null` those without any."""
    page = await state.store.jobs.page(caller.id, after, limit, _metadata(request), status)
    return await page_reply(state, caller, page, after, partial(shown_job, state), tells_ends=False)


@router.get("/jobs/{job_id}", responses=error_responses(404), summary="Retrieve a fine-tuning job")
async def retrieve_job(job_id: str, caller: Caller, state: Shared) -> JobObject:
    """Describes a job and how far it is."""
    return shown_job(state, await find_job(state, caller, job_id))


@router.post("/jobs/{job_id}/cancel", responses=error_responses(404, 409), summary="Cancel a job")
async def cancel_job(job_id: str, caller: Caller, state: Shared) -> JobObject:
    """Ends a job for good. Its checkpoints stay."""
    return shown_job(state, await state.job_controller.cancel(await find_job(state, caller, job_id)))


@router.post("/jobs/{job_id}/pause", responses=error_responses(404, 409), summary="Pause a job")
async def pause_job(job_id: str, caller: Caller, state: Shared) -> JobObject:
    """Stops a job after a checkpoint, so that it can be resumed."""
    return shown_job(state, await state.job_controller.pause(await find_job(state, caller, job_id)))


@router.post("/jobs/{job_id}/resume", responses=error_responses(404, 409), summary="Resume a job")
async def resume_job(job_id: str, caller: Caller, state: Shared) -> JobObject:
    """Lets a paused job go on from where it was."""
    return shown_job(state, await state.job_controller.resume(await find_job(state, caller, job_id)))


@router.post("/jobs/{job_id}/save", responses=error_responses(404, 409), summary="Stop and save a job")
async def save_job(job_id: str, caller: Caller, state: Shared) -> JobObject:
    """Ends a job with what it has learnt: after a checkpoint it succeeds, and its adapter is that one, or the
    best where the job keeps that."""
    return shown_job(state, await state.job_controller.save(await find_job(state, caller, job_id)))


@router.get(
    "/jobs/{job_id}/configuration",
    response_model_exclude_unset=True,
    responses=error_responses(404),
    summary="Retrieve a job's configuration",
)
async def retrieve_configuration(job_id: str, caller: Caller, state: Shared) -> JobRequest:
    """The body that creates the same job again: with the seed, and every "auto" and default as it was
    chosen."""
    return configuration_of(await find_job(state, caller, job_id))


@router.get(
    "/jobs/{job_id}/events",
    response_model=EventList,
    responses=error_responses(404),
    summary="List a job's events",
)
async def list_events(
    job_id: str, caller: Caller, state: Shared, after: After = None, limit: Limit = 20
) -> Response:
    """Lists what happened to a job, the newest first. Events of type `metrics` hold an optimizer step's
    figures."""
    job = await find_job(state, caller, job_id)
    page = await state.store.job_history.events(job.id, after, limit)
    return await page_reply(state, caller, page, after, _event, tells_ends=False)


@router.get(
    "/jobs/{job_id}/checkpoints",
    response_model=CheckpointList,
    responses=error_responses(404),
    summary="List a job's checkpoints",
)
async def list_checkpoints(
    job_id: str, caller: Caller, state: Shared, after: After = None, limit: Limit = 10
) -> Response:
    """A job's adapter at several steps, the newest first. Each can be sampled while the job runs."""
    job = await find_job(state, caller, job_id)
    page = await state.store.job_history.checkpoints(job.id, after, limit)
    return await page_reply(state, caller, page, after, checkpoint_told)


async def find_job(state: State, tenant: Tenant, id: str) -> JobRecord:
    """The tenant's job. Raises ApiError 404."""
    job = await state.store.jobs.get(tenant.id, id)
    if job is None:
        message = f"Could not find fine-tuning job: {id}"
        raise not_found(message, param="fine_tuning_job_id", code="fine_tune_not_found")
    return job


async def _training_file(state: State, tenant: Tenant, id: str, param: str) -> File:
    file = await find_file(state, tenant, id, param)
    if file.purpose != "fine-tune":
        message = f"{id} was not uploaded for 'fine-tune': it is for '{file.purpose}'."
        raise ApiError(400, message, param=param, code="invalid_file")
    return file


def _name_of(model: Model, tenant: Tenant, suffix: str | None, id: str) -> str:
    base = model.base.rpartition("/")[2]
    return f"ft:{base}:{tenant.name}:{suffix or ''}:{tail_of(id)[:_NAMED]}"


def _metadata(request: Request) -> dict[str, str] | None:
    """The filter in the query: an empty one for jobs without metadata, None for no filter.

    Raises ApiError 400 for an invalid one.
    """
    pairs = request.query_params.multi_items()
    if ("metadata", "null") in pairs:
        return {}
    found = {
        name.removeprefix("metadata[").removesuffix("]"): value
        for name, value in pairs
        if name.startswith("metadata[") and name.endswith("]")
    }
    if len(found) > MOST_METADATA:
        message = f"Invalid value for 'metadata': {len(found)} pairs; a job has {MOST_METADATA} at most."
        raise ApiError(400, message, param="metadata", code="invalid_value")
    return found or None


def _slowdown(state: State, job: JobRecord) -> float | None:
    stats = state.link.stats
    has_trained = job.status == JobStatus.RUNNING and job.step > 0
    return stats.slowdown if stats is not None and has_trained else None


def _examples(job: JobRecord) -> dict[str, int] | None:
    counts = {
        "trained": job.examples, "truncated": job.truncated, "skipped": job.skipped, "dropped": job.dropped
    }  # fmt: skip
    return {name: count or 0 for name, count in counts.items()} if job.examples else None


def shown_job(state: State, job: JobRecord) -> JobObject:
    """A job as it is told."""
    finish = left = None
    if job.status == JobStatus.RUNNING and None not in (job.pace, job.stepped, job.steps):
        assert job.pace is not None and job.stepped is not None and job.steps is not None
        left = job.pace * (job.steps - job.step)
        finish = int(job.stepped + left)
    progress = {
        "step": job.step,
        "total_steps": job.steps,
        "seconds_per_step": job.pace,
        "seconds_left": left,
    }
    return JobObject.model_validate(
        {
            "id": job.id,
            "model": job.model,
            "status": job.status,
            "waiting_for": state.job_controller.reason(job),
            "waiting_since": state.job_controller.starved_since(job),
            "created_at": job.created,
            "finished_at": job.finished,
            "estimated_finish": finish,
            "progress": None if job.steps is None else progress,
            "stopping": job.saving,
            "slowdown": _slowdown(state, job),
            "fine_tuned_model": job.name if job.status == JobStatus.SUCCEEDED else None,
            "organization_id": job.tenant,
            "training_file": job.training_file,
            "validation_file": job.validation_file,
            "result_files": [] if job.result_file is None else [job.result_file],
            "hyperparameters": job.hyperparameters,
            "method": method_used(job),
            "seed": job.seed,
            "trained_tokens": job.trained_tokens if job.status.is_final or job.step else None,
            "examples": _examples(job),
            "error": job.error,
            "metadata": job.labels,
            "user_provided_suffix": job.suffix,
            "integrations": job.integrations or [],
            "peft": job.peft,
            "optimizer": job.optimizer,
        }
    )


def _validation(
    job: JobRecord, training: File, preview: JobPreview, refusal: ApiError | None
) -> JobValidation:
    error = refusal and {"code": refusal.code or "", "message": refusal.message, "param": refusal.param}
    return JobValidation.model_validate(
        {
            "valid": refusal is None,
            "error": error,
            "model": job.model,
            "training_file": job.training_file,
            "filename": training.filename,
            **told_preview(preview, training.examples, job.options["too_long"]),
            "method": method_used(job),
        }
    )


def _event(event: Event) -> EventObject:
    return EventObject.model_validate(
        {
            "id": event.id,
            "created_at": event.created,
            "level": event.level,
            "message": event.message,
            "type": event.type,
            "data": event.data,
        }
    )


def checkpoint_told(checkpoint: CheckpointRecord) -> CheckpointObject:
    """A checkpoint as it is told."""
    return CheckpointObject(
        id=checkpoint.id,
        created_at=checkpoint.created,
        fine_tuned_model_checkpoint=checkpoint.name,
        fine_tuning_job_id=checkpoint.job,
        metrics=checkpoint.metrics,
        step_number=checkpoint.step,
    )
