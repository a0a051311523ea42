"""`/v1/files`: training data in, results out."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse

from coserve.errors import DataError, QuotaExceeded, StateError
from coserve.jobs import datasets
from coserve.jobs.containers import suffix_of
from coserve.jobs.limits import limits_of
from coserve.sandbox.pool import Cancellation
from coserve.serve.errors import ApiError, error_responses, not_found
from coserve.serve.evals.entries import read_entries
from coserve.serve.http.auth import Caller
from coserve.serve.http.idempotency import KEYED
from coserve.serve.http.pages import page_reply
from coserve.serve.http.streams import ClientGone, unless_gone
from coserve.serve.http.uploads import Upload
from coserve.serve.schema.files import (
    LEAST_LIFE,
    LONGEST_LIFE,
    UPLOAD,
    FileDeleted,
    FileList,
    FileObject,
    Purpose,
)
from coserve.serve.state import Shared, State
from coserve.serve.store.durable import partial_of, settle
from coserve.serve.store.ids import new_id
from coserve.serve.store.quotas import UPLOADED
from coserve.serve.store.records import File, Tenant

router = APIRouter(tags=["Files"])
_LONGEST_NAME = 255
_MOST = 10_000  # files of one page
_DIGITS = 10  # of a number of seconds


@router.post(
    "/v1/files",
    responses=error_responses(409, 413, 422),
    openapi_extra={**UPLOAD, **KEYED},
    summary="Upload a file",
)
async def upload_file(request: Request, caller: Caller, state: Shared) -> FileObject:
    """Takes training data: JSONL, a JSON array, a table (`.csv`, `.tsv`), each also compressed (`.gz`),
    a `.parquet`, or a `.txt` corpus of paragraphs. Each record is checked, and the first three bad ones are
    named. Or a batch's requests (JSONL), which are checked when the batch is made. With `expires_after` the
    file is deleted so many seconds after its creation, or once no unfinished job reads it any more."""
    id = new_id("file")
    upload = Upload(partial_of(state.settings.files / id), state.settings.max_file_bytes)
    try:
        await upload.receive(request)
        file = _described(upload, id, caller, int(state.store.clock()))
        path = state.store.file_path(file)
        upload.path = upload.path.rename(partial_of(path))  # its suffix says how to read it
        file = await surveyed(request, state, caller, upload.path, file)
        await asyncio.to_thread(settle, upload.path, path)
    finally:
        upload.path.unlink(missing_ok=True)
    try:
        await state.store.files.add(file)
    except (QuotaExceeded, StateError):
        await state.store.artifacts.discard(path)
        raise
    return shown_file(file)


@router.get("/v1/files", response_model=FileList, responses=error_responses(), summary="List files")
async def list_files(
    caller: Caller,
    state: Shared,
    after: Annotated[str | None, Query(description="The last file of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=_MOST)] = _MOST,
    order: Literal["asc", "desc"] = "desc",
    purpose: Purpose | None = None,
) -> Response:
    """The caller's files, the newest first unless `order` says otherwise."""
    page = await state.store.files.page(caller.id, after, limit, order == "asc", purpose)
    return await page_reply(state, caller, page, after, shown_file)


@router.get("/v1/files/{file_id}", responses=error_responses(404), summary="Retrieve a file")
async def retrieve_file(file_id: str, caller: Caller, state: Shared) -> FileObject:
    """Describes a file."""
    return shown_file(await find_file(state, caller, file_id, "file_id"))


@router.get(
    "/v1/files/{file_id}/content",
    responses=error_responses(404),
    response_class=FileResponse,
    summary="Download a file",
)
async def download_file(file_id: str, caller: Caller, state: Shared) -> FileResponse:
    """The bytes as they came."""
    file = await find_file(state, caller, file_id, "file_id")
    path = await state.store.bring_file(file)
    if not await asyncio.to_thread(path.is_file):  # deleted a moment ago
        raise no_such_file(file_id, "file_id")
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


@router.delete("/v1/files/{file_id}", responses=error_responses(404, 409), summary="Delete a file")
async def delete_file(file_id: str, caller: Caller, state: Shared) -> FileDeleted:
    """Deletes a file, unless a job that is not over reads it."""
    file = await state.store.files.remove(caller.id, file_id)
    if file is None:
        raise no_such_file(file_id, "file_id")
    await state.store.artifacts.discard(state.store.file_path(file))
    return FileDeleted(id=file.id)


async def find_file(state: State, tenant: Tenant, id: str, param: str) -> File:
    """The tenant's file. Raises ApiError 404."""
    file = await state.store.files.get(tenant.id, id)
    if file is None:
        raise no_such_file(id, param)
    return file


def _described(upload: Upload, id: str, tenant: Tenant, now: int) -> File:
    """Purpose that the form states for the upload. Raises ApiError 400."""
    purpose = upload.fields.pop("purpose", None)
    if purpose is None:
        message = "Missing required parameter: 'purpose'."
        raise ApiError(400, message, param="purpose", code="missing_required_parameter")
    if purpose not in UPLOADED:
        known = " and ".join(f"'{name}'" for name in UPLOADED)
        message = f"Invalid value for 'purpose': '{purpose}'; files are uploaded for {known}."
        raise ApiError(400, message, param="purpose", code="invalid_value")
    expires = _expires(upload, now)
    if upload.fields:
        name = min(upload.fields)
        raise ApiError(400, f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
    file = described_file(tenant, upload.filename or "", purpose, upload.bytes, now, expires)
    return replace(file, id=id)


def described_file(tenant: Tenant, name: str, purpose: str, size: int, now: int, expires: int | None) -> File:
    """A file that is uploaded now, with a new id."""
    name = name[:_LONGEST_NAME]
    return File(new_id("file"), tenant.id, name, purpose, size, now, suffix_of(name), expires=expires)


async def surveyed(request: Request, state: State, tenant: Tenant, path: Path, file: File) -> File:
    """A file at `path` with what is told of its contents. Raises ApiError 400 for bad training data."""
    if file.purpose == "evals":
        return replace(file, examples=await _check_evals(state, tenant, path))
    if file.purpose != "fine-tune":
        return file
    examples, ignored = await _survey(request, state, tenant, path, file.filename)
    details = f"Not read of its records: {', '.join(ignored)}" if ignored else None
    return replace(file, examples=examples, details=details)


def _expires(upload: Upload, now: int) -> int | None:
    """The time at which a file that is uploaded now expires, by the form's fields. Raises ApiError 400."""
    anchor, seconds = (upload.fields.pop(f"expires_after[{name}]", None) for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        message = f"Invalid value for 'expires_after.anchor': {anchor!r}; files expire after 'created_at'."
        raise ApiError(400, message, param="expires_after.anchor", code="invalid_value")
    whole = seconds is not None and len(seconds) <= _DIGITS and seconds.isascii() and seconds.isdigit()
    if not whole or not LEAST_LIFE <= int(seconds or 0) <= LONGEST_LIFE:
        message = (
            f"Invalid value for 'expires_after.seconds': {seconds!r}; expected a whole number from "
            f"{LEAST_LIFE} (an hour) to {LONGEST_LIFE} (30 days)."
        )
        raise ApiError(400, message, param="expires_after.seconds", code="invalid_value")
    return now + int(seconds or 0)


async def _survey(
    request: Request, state: State, tenant: Tenant, path: Path, name: str
) -> tuple[int, tuple[str, ...]]:
    """The number of a file's examples, all of which are read, and their keys that are not; reading ends once
    the client disconnects. Raises ApiError 400, naming the first invalid line."""
    cancellation = Cancellation()
    limits = limits_of(state.settings.engine)
    work = state.data.run(
        tenant.id, datasets.survey, path, name, limits, cancellation, cancellation=cancellation
    )
    try:
        return await unless_gone(request.receive, work)
    except ClientGone as error:
        raise ApiError(400, "The client left before its file was read.") from error
    except DataError as error:
        raise ApiError(400, str(error), param="file", code="invalid_file") from error


async def _check_evals(state: State, tenant: Tenant, path: Path) -> int:
    """The number of records of a file for evals. Raises ApiError 400, naming the first invalid line."""
    try:
        return len(await state.data.run(tenant.id, read_entries, path))
    except DataError as error:
        raise ApiError(400, str(error), param="file", code="invalid_file") from error


def no_such_file(id: str, param: str) -> ApiError:
    """The error for an unknown file."""
    return not_found(f"No such File object: {id}", param=param, code="file_not_found")


def shown_file(file: File) -> FileObject:
    """A file as it is told."""
    return FileObject(
        id=file.id,
        bytes=file.bytes,
        created_at=file.created,
        filename=file.filename,
        status_details=file.details,
        expires_at=file.expires,
        purpose=cast(Purpose, file.purpose),
    )
