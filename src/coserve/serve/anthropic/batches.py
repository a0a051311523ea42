"""`/v1/messages/batches`: requests for messages below everything else, as the batches of OpenAI's API are."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from coserve.serve.anthropic.batch_schema import (
    MOST_PAGED,
    Cursor,
    MessageBatchCounts,
    MessageBatchDeleted,
    MessageBatchList,
    MessageBatchObject,
    MessageBatchRequest,
    PageSize,
    no_such_cursor,
    one_cursor,
    told_time,
)
from coserve.serve.anthropic.errors import ERRORS
from coserve.serve.anthropic.routes import MESSAGES
from coserve.serve.anthropic.schema import MessageError
from coserve.serve.errors import ApiError, error_responses, not_found
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.routes.batches import Runner
from coserve.serve.state import Shared, State
from coserve.serve.store.batches import UNENDED
from coserve.serve.store.ids import new_id
from coserve.serve.store.records import BatchRecord, File, Tenant

BATCHES: Final = f"{MESSAGES}/batches"
_WINDOW: Final = 24 * 3600  # seconds
_LIFE: Final = 29 * 24 * 3600  # seconds that results are kept
_PIECE: Final = 1 << 17  # bytes of results that are read at once
_ENDS: Final = {"batch_cancelled": "canceled", "batch_expired": "expired"}  # by codes in files of results
_RESPONSES: Final = error_responses(404, 409, shape=ERRORS, model=MessageError)

router = APIRouter(prefix=BATCHES, route_class=JsonRoute, tags=["Messages"])


@router.post("", responses=_RESPONSES, summary="Create a batch of messages")
async def create_message_batch(
    body: MessageBatchRequest, request: Request, caller: Caller, state: Shared, runner: Runner
) -> MessageBatchObject:
    """Answers requests for messages in time and memory that no other request takes."""
    batch = BatchRecord(
        id=new_id("msgbatch").replace("-", "_", 1),
        tenant=caller.id,
        status="validating",
        endpoint=MESSAGES,
        input_file="",
        created=int(state.store.clock()),
        window=_WINDOW,
        life=_LIFE,
        total=len(body.requests),
    )
    await runner.add_lines(batch, _lines(body))
    return await _shown(request, state, batch)


@router.get("", responses=_RESPONSES, summary="List batches of messages")
async def list_message_batches(
    request: Request,
    caller: Caller,
    state: Shared,
    after_id: Cursor = None,
    before_id: Cursor = None,
    limit: PageSize = 20,
) -> MessageBatchList:
    """The caller's batches, the newest first."""
    at, is_backwards = one_cursor(after_id, before_id)
    most = min(limit, MOST_PAGED)
    page = await state.store.batches.page(caller.id, at, most, MESSAGES, is_backwards)
    if page is None:
        raise no_such_cursor(at)
    records = page.records[::-1] if is_backwards else page.records
    data = [await _shown(request, state, batch) for batch in records]
    return MessageBatchList.of(data, page.has_more)


@router.get("/{batch_id}", responses=_RESPONSES, summary="Retrieve a batch of messages")
async def retrieve_message_batch(
    batch_id: str, request: Request, caller: Caller, state: Shared
) -> MessageBatchObject:
    """Tells whether a batch has ended, and what became of its requests."""
    return await _shown(request, state, await _find(state, caller, batch_id))


@router.post("/{batch_id}/cancel", responses=_RESPONSES, summary="Cancel a batch of messages")
async def cancel_message_batch(
    batch_id: str, request: Request, caller: Caller, state: Shared, runner: Runner
) -> MessageBatchObject:
    """Ends a batch. The answers so far are kept."""
    batch = await _find(state, caller, batch_id)
    return await _shown(request, state, await runner.cancel(batch) or await _find(state, caller, batch_id))


@router.delete("/{batch_id}", responses=_RESPONSES, summary="Delete a batch of messages")
async def delete_message_batch(batch_id: str, caller: Caller, state: Shared) -> MessageBatchDeleted:
    """Deletes a batch that has ended, and its results."""
    batch = await _find(state, caller, batch_id)
    if batch.status in UNENDED or not await state.store.batches.remove(caller.id, batch_id):
        raise ApiError(400, f"The batch {batch_id} has not ended: cancel it first.", code="batch_not_ended")
    for id in filter(None, (batch.output_file, batch.error_file)):
        if file := await state.store.files.remove(caller.id, id):
            await state.store.artifacts.discard(state.store.file_path(file))
    return MessageBatchDeleted(id=batch_id)


@router.get(
    "/{batch_id}/results",
    responses=_RESPONSES,
    response_class=StreamingResponse,
    summary="Results of a batch of messages",
)
async def read_message_batch(batch_id: str, caller: Caller, state: Shared) -> StreamingResponse:
    """A line of JSON for each request, in no order."""
    batch = await _find(state, caller, batch_id)
    if batch.status in UNENDED:
        raise ApiError(400, f"The batch {batch_id} has not ended.", code="batch_not_ended")
    files = await _files(state, batch)
    if not files:
        raise not_found(f"The results of the batch {batch_id} were deleted.", code="results_deleted")
    paths = [await state.store.bring_file(file) for file in files]
    return StreamingResponse(_results(state, caller, paths), media_type="application/x-jsonl")


async def _results(state: State, caller: Tenant, paths: list[Path]) -> AsyncIterator[bytes]:
    """Lines of files of results in Anthropic's form, in pieces that are made beside the event loop."""
    for path in paths:
        with await asyncio.to_thread(path.open, "rb") as file:
            while piece := await state.bodies.run(caller.id, _converted, file):
                yield piece


def _converted(file: IO[bytes]) -> bytes:
    """The next lines; empty at the end."""
    return b"".join(map(_result, file.readlines(_PIECE)))


def _result(line: bytes) -> bytes:
    told = msgspec.json.decode(line, type=_ResultLine)
    result: Mapping[str, Any]
    if told.response is not None and told.response.status_code == 200:
        result = {"type": "succeeded", "message": told.response.body}
    elif told.response is not None:
        result = {"type": "errored", "error": told.response.body}
    elif told.error is not None and (end := _ENDS.get(told.error.code)):
        result = {"type": end}
    else:
        message = "" if told.error is None else told.error.message
        result = {"type": "errored", "error": ERRORS.body(ApiError(400, message), "")}
    return msgspec.json.encode({"custom_id": told.custom_id, "result": result}) + b"\n"


class _Answered(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Unanswered(msgspec.Struct):
    code: str
    message: str


class _ResultLine(msgspec.Struct):
    custom_id: str
    response: _Answered | None
    error: _Unanswered | None


def _lines(body: MessageBatchRequest) -> Iterator[bytes]:
    """The requests as lines of a batch's input."""
    for one in body.requests:
        line = {"custom_id": one.custom_id, "method": "POST", "url": MESSAGES, "body": one.params}
        yield msgspec.json.encode(line) + b"\n"


async def _find(state: State, caller: Tenant, id: str) -> BatchRecord:
    batch = await state.store.batches.get(caller.id, id)
    if batch is None or batch.endpoint != MESSAGES:
        raise not_found(f"No such message batch: {id}", param="batch_id", code="batch_not_found")
    return batch


async def _files(state: State, batch: BatchRecord) -> list[File]:
    """The files of results that are still there."""
    ids = filter(None, (batch.output_file, batch.error_file))
    return [file for id in ids if (file := await state.store.files.get(batch.tenant, id)) is not None]


async def _shown(request: Request, state: State, batch: BatchRecord) -> MessageBatchObject:
    counts, files = MessageBatchCounts(), list[File]()
    if batch.status in UNENDED:
        counts.processing = batch.total
    else:
        files = await _files(state, batch)
        counts = await _counts(state, batch, files)
    gone = None if files else batch.ended
    return MessageBatchObject(
        id=batch.id,
        processing_status=(
            "canceling"
            if batch.status == "cancelling"
            else "in_progress"
            if batch.status in UNENDED
            else "ended"
        ),
        request_counts=counts,
        created_at=told_time(batch.created),
        expires_at=told_time(batch.expires),
        ended_at=None if batch.ended is None else told_time(batch.ended),
        cancel_initiated_at=None if batch.cancelling is None else told_time(batch.cancelling),
        archived_at=told_time(int(min(gone + _LIFE, state.store.clock()))) if gone else None,
        results_url=f"{str(request.base_url).rstrip('/')}{BATCHES}/{batch.id}/results" if files else None,
    )


async def _counts(state: State, batch: BatchRecord, files: list[File]) -> MessageBatchCounts:
    """Counts of a batch that has ended, by what became of its requests. How many were not begun is read from
    the file that says so of each."""
    counts = MessageBatchCounts(succeeded=batch.completed, errored=batch.failed)
    if batch.status not in ("cancelled", "expired"):
        return counts
    unbegun = batch.failed
    for file in files:
        if file.id == batch.error_file:
            path = await state.store.bring_file(file)
            unbegun = await asyncio.to_thread(_count, path, f"batch_{batch.status}".encode())
    name = "canceled" if batch.status == "cancelled" else "expired"
    return counts.model_copy(update={"errored": batch.failed - unbegun, name: unbegun})


def _count(path: Path, code: bytes) -> int:
    with path.open("rb") as file:
        return sum(b'"error":{"code":"%b"' % code in line for line in file)
