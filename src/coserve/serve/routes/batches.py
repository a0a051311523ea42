"""`/v1/batches`: the lines of a file as requests."""

from typing import Annotated, cast

from fastapi import APIRouter, Depends, Query, Request

from coserve.serve.batches.runner import Batches
from coserve.serve.errors import ApiError, error_responses, not_found
from coserve.serve.http.auth import Caller
from coserve.serve.http.idempotency import KEYED
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.pages import unknown_cursor
from coserve.serve.routes.files import find_file, no_such_file
from coserve.serve.schema.batches import BatchCounts, BatchList, BatchObject, BatchRequest, BatchStatus
from coserve.serve.state import Shared
from coserve.serve.store.ids import new_id
from coserve.serve.store.records import BatchRecord, Tenant

router = APIRouter(prefix="/v1/batches", route_class=JsonRoute, tags=["Batches"])
_HOUR = 3600


async def _batches(request: Request) -> Batches:
    """FastAPI's dependency for `Batches`; a coroutine, as FastAPI runs others in threads."""
    found: Batches = request.app.state.batches
    return found


Runner = Annotated[Batches, Depends(_batches)]


@router.post("", responses=error_responses(404, 409, 422), openapi_extra=KEYED, summary="Create a batch")
async def create_batch(body: BatchRequest, caller: Caller, state: Shared, runner: Runner) -> BatchObject:
    """Answers the requests in a file below everything else: in time and memory that no other request takes.
    The answers are a file, too; a line that is wrong fails alone."""
    file = await find_file(state, caller, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        message = f"{file.id} was not uploaded for 'batch': it is for '{file.purpose}'."
        raise ApiError(400, message, param="input_file_id", code="invalid_file")
    batch = BatchRecord(
        id=new_id("batch").replace("-", "_", 1),
        tenant=caller.id,
        status="validating",
        endpoint=body.endpoint,
        input_file=file.id,
        created=int(state.store.clock()),
        window=int(body.completion_window[:-1]) * _HOUR,
        life=None if body.output_expires_after is None else body.output_expires_after.seconds,
        labels=body.metadata,
    )
    try:
        await runner.add(batch, await state.store.bring_file(file))
    except FileNotFoundError:  # deleted a moment ago
        raise no_such_file(file.id, "input_file_id") from None
    return _shown(runner, batch)


@router.get("", responses=error_responses(), summary="List batches")
async def list_batches(
    caller: Caller,
    state: Shared,
    runner: Runner,
    after: Annotated[str | None, Query(description="The last batch of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BatchList:
    """The caller's batches, the newest first."""
    page = await state.store.batches.page(caller.id, after, limit)
    if page is None:
        raise unknown_cursor(after)
    return BatchList.of([_shown(runner, batch) for batch in page.records], page.has_more)


@router.get("/{batch_id}", responses=error_responses(404), summary="Retrieve a batch")
async def retrieve_batch(batch_id: str, caller: Caller, runner: Runner) -> BatchObject:
    """Tells how far a batch is, and at its end which files have its results."""
    return _shown(runner, await _find(runner, caller, batch_id))


@router.post("/{batch_id}/cancel", responses=error_responses(404, 409), summary="Cancel a batch")
async def cancel_batch(batch_id: str, caller: Caller, runner: Runner) -> BatchObject:
    """Ends a batch. The answers so far are kept, and requests under way are given up."""
    batch = await _find(runner, caller, batch_id)
    cancelled = await runner.cancel(batch)
    if cancelled is None and batch.status != "cancelling":
        raise ApiError(409, f"The batch is {batch.status}, and cannot be cancelled.", code="batch_over")
    return _shown(runner, cancelled or batch)


async def _find(runner: Batches, caller: Tenant, id: str) -> BatchRecord:
    batch = await runner.state.store.batches.get(caller.id, id)
    if batch is None or not batch.input_file:  # one of Anthropic's API has none
        raise not_found(f"No such Batch object: {id}", param="batch_id", code="batch_not_found")
    return batch


def _shown(runner: Batches, batch: BatchRecord) -> BatchObject:
    completed, failed = runner.counts(batch)
    ends = {
        status: batch.ended if batch.status == status else None
        for status in ("completed", "failed", "expired", "cancelled")
    }
    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=batch.errors,
        input_file_id=batch.input_file,
        completion_window=f"{batch.window // _HOUR}h",
        status=cast(BatchStatus, batch.status),
        output_file_id=batch.output_file,
        error_file_id=batch.error_file,
        created_at=batch.created,
        in_progress_at=batch.began,
        expires_at=batch.expires,
        finalizing_at=batch.finalizing,
        completed_at=ends["completed"],
        failed_at=ends["failed"],
        expired_at=ends["expired"],
        cancelling_at=batch.cancelling,
        cancelled_at=ends["cancelled"],
        request_counts=BatchCounts(total=batch.total, completed=completed, failed=failed),
        metadata=batch.labels,
    )
