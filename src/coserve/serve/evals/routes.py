"""`/v1/evals`: graders over data, with or without a model that answers."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from coserve.errors import ConfigError
from coserve.serve.errors import ApiError, error_responses, not_found
from coserve.serve.evals.runs import criteria_of
from coserve.serve.evals.schema import (
    EvalChange,
    EvalDeleted,
    EvalItemObject,
    EvalObject,
    EvalPage,
    EvalRequest,
    EvalRunDeleted,
    EvalRunObject,
    EvalRunRequest,
    FileContent,
    MessagesTemplate,
    SampledData,
)
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import json_reply
from coserve.serve.http.pages import page_reply
from coserve.serve.routes.files import find_file
from coserve.serve.state import Shared, State
from coserve.serve.store.ids import new_id
from coserve.serve.store.records import EvalItemRecord, EvalRecord, EvalRunRecord, Tenant
from coserve.train.grading.asking import message_template, models_asked
from coserve.train.grading.graders import JsonSchemaGrader

router = APIRouter(route_class=JsonRoute, prefix="/v1/evals", tags=["Evals"])
After = Annotated[str | None, Query(description="The last one of the page before.")]
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
_RUNS, _ITEMS = "/{eval_id}/runs", "/{eval_id}/runs/{run_id}/output_items"
_COUNTS = {"passed": "pass", "failed": "fail", "errored": "error"}
# What the client's types want of every sample, also where no model answered or the answer failed.
_NO_SAMPLE: Final[Mapping[str, Any]] = {
    "error": {"code": "", "message": ""}, "finish_reason": "", "input": [], "output": [], "model": "",
    "max_completion_tokens": 0, "seed": 0, "temperature": 1.0, "top_p": 1.0,
    "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, "cached_tokens": 0},
}  # fmt: skip


@router.post(
    "", status_code=201, response_model=EvalObject, responses=error_responses(404), summary="Create an eval"
)
async def create_eval(body: EvalRequest, caller: Caller, state: Shared) -> Response:
    """Keeps graders, by which runs are measured."""
    try:
        await state.graders.run(caller.id, JsonSchemaGrader, body.data_source_config.item_schema)
    except ConfigError as error:
        message = str(error).replace("the grader's schema", "item_schema")
        param = "data_source_config.item_schema"
        raise ApiError(400, message, param=param, code="invalid_value") from error
    for one in await criteria_of(state, caller, body.testing_criteria):
        for name in sorted(models_asked(one.grader)):
            await state.catalog.find(caller, name)
    row = EvalRecord(
        new_id("eval"),
        caller.id,
        body.name or "Eval",
        int(state.store.clock()),
        body.data_source_config.model_dump(),
        [dict(one) for one in body.testing_criteria],
        labels=body.metadata,
    )
    await state.store.evals.add(row)
    return await _told(state, caller, _shown(row), 201)


@router.get("", response_model=EvalPage, responses=error_responses(), summary="List evals")
async def list_evals(
    caller: Caller,
    state: Shared,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    order_by: Literal["created_at", "updated_at"] = "created_at",
) -> Response:
    """The caller's evals, by their creation."""
    page = await state.store.evals.page(EvalRecord, caller.id, after, limit, order == "asc")
    return await page_reply(state, caller, page, after, _shown)


@router.get(
    "/{eval_id}", response_model=EvalObject, responses=error_responses(404), summary="Retrieve an eval"
)
async def retrieve_eval(eval_id: str, caller: Caller, state: Shared) -> Response:
    """Describes an eval."""
    return await _told(state, caller, _shown(await _find(state, caller, eval_id)))


@router.post(
    "/{eval_id}", response_model=EvalObject, responses=error_responses(404), summary="Change an eval"
)
async def update_eval(eval_id: str, body: EvalChange, caller: Caller, state: Shared) -> Response:
    """Changes an eval's name or metadata."""
    found = await _find(state, caller, eval_id)
    name = found.name if body.name is None else body.name
    labels = body.metadata if "metadata" in body.model_fields_set else found.labels
    await state.store.evals.change(found.id, name=name, labels=labels)
    return await _told(state, caller, _shown(await _find(state, caller, eval_id)))


@router.delete("/{eval_id}", responses=error_responses(404), summary="Delete an eval")
async def delete_eval(eval_id: str, caller: Caller, state: Shared) -> EvalDeleted:
    """Deletes an eval with all its runs; those under way end."""
    if not await state.store.evals.remove(caller.id, eval_id):
        raise _no_such("eval", eval_id)
    return EvalDeleted(eval_id=eval_id)


@router.post(
    _RUNS,
    status_code=201,
    response_model=EvalRunObject,
    responses=error_responses(404),
    summary="Run an eval",
)
async def create_run(eval_id: str, body: EvalRunRequest, caller: Caller, state: Shared) -> Response:
    """Measures data by an eval's graders, beside other work. A `model` answers them first."""
    found, asked, model = await _find(state, caller, eval_id), body.data_source, None
    if isinstance(asked, SampledData):
        model = (await state.catalog.find(caller, asked.model)).name
        if isinstance(asked.input_messages, MessagesTemplate):
            try:
                for one in asked.input_messages.template:
                    message_template(one, "input_messages")
            except ConfigError as error:
                param = "data_source.input_messages"
                raise ApiError(400, str(error), param=param, code="invalid_value") from error
    if isinstance(asked.source, FileContent):
        schema = found.source["item_schema"]
        items = [entry.item for entry in asked.source.content]
        if (wrong := await state.graders.run(caller.id, _mismatch, schema, items)) is not None:
            message = f"The item {wrong} of the data does not match the eval's item_schema."
            param = f"data_source.source.content.{wrong}.item"
            raise ApiError(400, message, param=param, code="invalid_value")
    else:
        file = await find_file(state, caller, asked.source.id, "data_source.source.id")
        if file.purpose != "evals":
            message = f"{file.id} was not uploaded for 'evals': it is for '{file.purpose}'."
            raise ApiError(400, message, param="data_source.source.id", code="invalid_file")
    row = EvalRunRecord(
        new_id("evalrun"),
        caller.id,
        found.id,
        body.name or "Run",
        int(state.store.clock()),
        "queued",
        asked.model_dump(by_alias=True, exclude_none=True),
        {"counts": {}, "criteria": {}, "models": {}},
        model=model,
        labels=body.metadata,
    )
    await state.store.evals.add_run(row)
    state.evals_changed.set()
    return await _told(state, caller, _run(row), 201)


@router.get(_RUNS, response_model=EvalPage, responses=error_responses(404), summary="List an eval's runs")
async def list_runs(
    eval_id: str,
    caller: Caller,
    state: Shared,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    status: Literal["queued", "in_progress", "completed", "canceled", "failed"] | None = None,
) -> Response:
    """Runs with what they have found so far."""
    of = [EvalRunRecord.eval == (await _find(state, caller, eval_id)).id]
    wanted = [] if status is None else [EvalRunRecord.status == status]
    page = await state.store.evals.page(EvalRunRecord, caller.id, after, limit, order == "asc", of, wanted)
    return await page_reply(state, caller, page, after, _run)


@router.get(
    _RUNS + "/{run_id}",
    response_model=EvalRunObject,
    responses=error_responses(404),
    summary="Retrieve a run",
)
async def retrieve_run(eval_id: str, run_id: str, caller: Caller, state: Shared) -> Response:
    """Describes a run and what it has found so far."""
    return await _told(state, caller, _run(await _find_run(state, caller, eval_id, run_id)))


@router.post(_RUNS + "/{run_id}", include_in_schema=False)  # as OpenAI's reference has it; its client:
@router.post(
    _RUNS + "/{run_id}/cancel",
    response_model=EvalRunObject,
    responses=error_responses(404, 409),
    summary="Cancel a run",
)
async def cancel_run(eval_id: str, run_id: str, caller: Caller, state: Shared) -> Response:
    """Ends a run; its outcomes so far stay."""
    run = await _find_run(state, caller, eval_id, run_id)
    if not await state.store.evals.cancel(run.id):
        raise ApiError(409, f"The run {run_id} is over already.", code="run_is_over")
    state.alert("eval.run.canceled", id=run.id)
    return await _told(state, caller, _run(await _find_run(state, caller, eval_id, run_id)))


@router.delete(_RUNS + "/{run_id}", responses=error_responses(404), summary="Delete a run")
async def delete_run(eval_id: str, run_id: str, caller: Caller, state: Shared) -> EvalRunDeleted:
    """Deletes a run with its outcomes."""
    if not await state.store.evals.remove_run(caller.id, eval_id, run_id):
        raise _no_such("run", run_id)
    return EvalRunDeleted(run_id=run_id)


@router.get(_ITEMS, response_model=EvalPage, responses=error_responses(404), summary="List a run's outcomes")
async def list_output_items(
    eval_id: str,
    run_id: str,
    caller: Caller,
    state: Shared,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    status: Literal["pass", "fail"] | None = None,
) -> Response:
    """The outcome for each item, in the order in which they were found."""
    run = await _find_run(state, caller, eval_id, run_id)
    of = [EvalItemRecord.run == run.id]
    wanted = [] if status is None else [EvalItemRecord.status == status]
    page = await state.store.evals.page(EvalItemRecord, caller.id, after, limit, order == "asc", of, wanted)
    return await page_reply(state, caller, page, after, lambda row: _item(eval_id, row))


@router.get(
    _ITEMS + "/{item_id}",
    response_model=EvalItemObject,
    responses=error_responses(404),
    summary="Retrieve an outcome",
)
async def retrieve_output_item(
    eval_id: str, run_id: str, item_id: str, caller: Caller, state: Shared
) -> Response:
    """The outcome for one item."""
    run = await _find_run(state, caller, eval_id, run_id)
    row = await state.store.evals.get(EvalItemRecord, caller.id, item_id)
    if row is None or row.run != run.id:
        raise _no_such("output_item", item_id)
    return await _told(state, caller, _item(eval_id, row))


async def _find(state: State, tenant: Tenant, id: str) -> EvalRecord:
    if (found := await state.store.evals.get(EvalRecord, tenant.id, id)) is None:
        raise _no_such("eval", id)
    return found


async def _find_run(state: State, tenant: Tenant, eval_id: str, id: str) -> EvalRunRecord:
    found = await state.store.evals.get(EvalRunRecord, tenant.id, id)
    if found is None or found.eval != eval_id:
        raise _no_such("run", id)
    return found


async def _told(state: State, caller: Tenant, value: BaseModel, status: int = 200) -> Response:
    """A reply that holds what clients have sent, and is written beside the loop."""
    found = await json_reply(state.bodies, caller.id, value)
    found.status_code = status
    return found


def _no_such(what: str, id: str) -> ApiError:
    return not_found(f"Could not find {what}: {id}", param=f"{what}_id", code=f"{what}_not_found")


def _mismatch(schema: Mapping[str, Any], items: list[dict[str, Any]]) -> int | None:
    """The first of the items that a schema does not accept."""
    judge = JsonSchemaGrader(schema)
    return next((n for n, item in enumerate(items) if not judge.grade(json.dumps(item), {})), None)


def _shown(row: EvalRecord) -> EvalObject:
    properties: dict[str, Any] = {"item": row.source["item_schema"]}
    if row.source["include_sample_schema"]:
        properties["sample"] = {"type": "object", "properties": {"output_text": {"type": "string"}}}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return EvalObject(
        id=row.id,
        created_at=row.created,
        name=row.name,
        data_source_config={"type": "custom", "schema": schema},
        testing_criteria=row.criteria,
        metadata=row.labels,
    )


def _run(row: EvalRunRecord) -> EvalRunObject:
    tally = row.tally
    counts = {name: tally["counts"].get(kind, 0) for name, kind in _COUNTS.items()}
    return EvalRunObject.model_validate({
        "id": row.id,
        "eval_id": row.eval,
        "created_at": row.created,
        "name": row.name,
        "status": row.status,
        "model": row.model or "",
        "data_source": row.source,
        "error": row.error or {"code": "", "message": ""},
        "metadata": row.labels,
        "result_counts": {"total": sum(counts.values()), **counts},
        "per_model_usage": [
            {
                "model_name": name, "invocation_count": answers, "prompt_tokens": read,
                "completion_tokens": written, "total_tokens": read + written, "cached_tokens": 0,
            }
            for name, (answers, read, written) in tally["models"].items()
        ],
        "per_testing_criteria_results": [
            {"testing_criteria": name, "passed": passed, "failed": failed}
            for name, (passed, failed) in tally["criteria"].items()
        ],
    })  # fmt: skip


def _item(eval_id: str, row: EvalItemRecord) -> EvalItemObject:
    return EvalItemObject(
        id=row.id,
        created_at=row.created,
        eval_id=eval_id,
        run_id=row.run,
        status=row.status,
        datasource_item_id=row.place,
        datasource_item=row.item,
        results=row.results,
        sample={**_NO_SAMPLE, **(row.sample or {})},
    )
