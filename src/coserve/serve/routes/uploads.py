"""`/v1/uploads`: files that come in parts."""

import asyncio
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from coserve.serve.errors import ApiError, error_responses, not_found
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.quotas import DISK_RESERVE
from coserve.serve.http.uploads import Upload
from coserve.serve.offload import TenantTurns
from coserve.serve.routes.files import described_file, shown_file, surveyed
from coserve.serve.schema.batches import OutputExpiresAfter
from coserve.serve.schema.common import RequestBody
from coserve.serve.schema.files import BINARY, FileObject, form_of
from coserve.serve.state import Shared, State
from coserve.serve.store.durable import partial_of, settle
from coserve.serve.store.ids import new_id
from coserve.serve.store.records import File, Tenant, UploadRecord

MOST_UPLOAD_PARTS: Final = 1024
LONGEST_FILENAME: Final = 255
_MOST_BYTES: Final = 1 << 40  # the server's `max_file_bytes` bounds them further
PartId = Annotated[str, Field(pattern=r"^part_[A-Za-z0-9]{24}$")]


class UploadRequest(RequestBody):
    """A file that comes in parts."""

    filename: str = Field(min_length=1, max_length=LONGEST_FILENAME)
    purpose: Literal["fine-tune", "batch"]
    bytes: int = Field(ge=1, le=_MOST_BYTES, description="Of all parts together.")
    mime_type: str = Field(max_length=LONGEST_FILENAME, description="Accepted, not used.")
    expires_after: OutputExpiresAfter | None = Field(None, description="As of a file.")


class CompleteUploadRequest(RequestBody):
    part_ids: Annotated[list[PartId], Field(fail_fast=True, min_length=1, max_length=MOST_UPLOAD_PARTS)]
    md5: str | None = Field(None, pattern=r"^[0-9a-fA-F]{32}$", description="Of the whole file.")


class UploadObject(BaseModel):
    """An upload of the caller's."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileObject | None = None


class UploadPartObject(BaseModel):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


router = APIRouter(prefix="/v1/uploads", route_class=JsonRoute, tags=["Files"])
PART: Final = form_of(["data"], {"data": BINARY})
LARGEST_PART: Final = 64 << 20  # bytes, as OpenAI has it
_SECONDS: Final = 3600  # that an upload may take
_PIECE: Final = 1 << 20
_turns = TenantTurns()  # of uploads: one part at a time, so that all parts together keep to the size


@router.post("", responses=error_responses(507), summary="Begin an upload")
async def create_upload(body: UploadRequest, caller: Caller, state: Shared) -> UploadObject:
    """Begins a file that comes in parts, for an hour. All of its bytes count as kept from now on."""
    if body.bytes > (most := state.settings.max_file_bytes):
        message = f"Invalid value for 'bytes': a file may have {most} (the server's max_file_bytes)."
        raise ApiError(400, message, param="bytes", code="invalid_value")
    free = (await asyncio.to_thread(shutil.disk_usage, state.settings.state)).free
    if body.bytes > free - DISK_RESERVE:
        raise ApiError(507, "The server's disk has no room for this file.", code="disk_full")
    now, life = int(state.store.clock()), None if body.expires_after is None else body.expires_after.seconds
    upload = UploadRecord(
        new_id("upload").replace("-", "_", 1), caller.id, "pending", body.filename, body.purpose, body.bytes,
        body.bytes, now, now + _SECONDS, life,
    )  # fmt: skip
    await state.store.uploads.add(upload)
    await asyncio.to_thread(state.store.upload_folder(upload.id).mkdir)
    return _shown(upload)


@router.post(
    "/{upload_id}/parts", responses=error_responses(404, 409), openapi_extra=PART, summary="Add a part"
)
async def add_upload_part(
    upload_id: str, request: Request, caller: Caller, state: Shared
) -> UploadPartObject:
    """Takes a part of a file: the field `data` of a form."""
    async with _turns.of(upload_id):
        upload = await _pending(state, caller, upload_id)
        folder, id = state.store.upload_folder(upload.id), new_id("part").replace("-", "_", 1)
        sizes = await asyncio.to_thread(_sizes, folder)
        if len(sizes) >= MOST_UPLOAD_PARTS:
            raise ApiError(400, f"An upload may have {MOST_UPLOAD_PARTS} parts.", code="invalid_value")
        part = Upload(partial_of(folder / id), min(LARGEST_PART, upload.size - sum(sizes)), "data")
        try:
            await part.receive(request)
            await asyncio.to_thread(settle, part.path, folder / id)
        except FileNotFoundError:  # cancelled a moment ago
            raise _missing(upload_id) from None
        finally:
            part.path.unlink(missing_ok=True)
    return UploadPartObject(id=id, created_at=int(state.store.clock()), upload_id=upload.id)


@router.post("/{upload_id}/complete", responses=error_responses(404, 409), summary="Complete an upload")
async def complete_upload(
    upload_id: str, body: CompleteUploadRequest, request: Request, caller: Caller, state: Shared
) -> UploadObject:
    """Makes a file of parts in the order in which they are named, and checks it as one that came whole."""
    async with _turns.of(upload_id):
        upload = await _pending(state, caller, upload_id)
        folder, now = state.store.upload_folder(upload.id), int(state.store.clock())
        expires = None if upload.life is None else now + upload.life
        file = described_file(caller, upload.filename, upload.purpose, upload.size, now, expires)
        path = state.store.file_path(file)
        partial = partial_of(path)
        try:
            await asyncio.to_thread(_join, folder, body.part_ids, partial, upload.size, body.md5)
            file = await surveyed(request, state, caller, partial, file)
            await asyncio.to_thread(settle, partial, path)
            if not await state.store.uploads.end(upload.id, "completed", file):
                raise _missing(upload_id)
        except BaseException:
            await state.store.artifacts.discard(path)
            raise
        finally:
            await asyncio.to_thread(partial.unlink, missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    upload.status = "completed"
    return _shown(upload, file)


@router.post("/{upload_id}/cancel", responses=error_responses(404, 409), summary="Cancel an upload")
async def cancel_upload(upload_id: str, caller: Caller, state: Shared) -> UploadObject:
    """Ends an upload, and drops its parts."""
    async with _turns.of(upload_id):
        upload = await _pending(state, caller, upload_id)
        await state.store.uploads.end(upload.id, "cancelled")
        await asyncio.to_thread(shutil.rmtree, state.store.upload_folder(upload.id), ignore_errors=True)
    upload.status = "cancelled"
    return _shown(upload)


async def _pending(state: State, caller: Tenant, id: str) -> UploadRecord:
    """The tenant's upload that takes parts. Raises ApiError 404, and 409 for one that is over."""
    upload = await state.store.uploads.get(caller.id, id)
    if upload is None:
        raise _missing(id)
    if upload.status != "pending" or upload.expires <= state.store.clock():
        status = "expired" if upload.status == "pending" else upload.status
        raise ApiError(409, f"The upload is {status}.", code="upload_over")
    return upload


def _missing(id: str) -> ApiError:
    return not_found(f"No such Upload object: {id}", param="upload_id", code="upload_not_found")


def _sizes(folder: Path) -> list[int]:
    return [entry.stat().st_size for entry in folder.glob("part_*")]


def _join(folder: Path, parts: Sequence[str], target: Path, size: int, md5: str | None) -> None:
    """Writes parts one after the other. Raises ApiError 400 for an unknown one, or where they are not what
    was announced."""
    digest, written = hashlib.md5(usedforsecurity=False), 0
    with target.open("xb") as file:
        for at, id in enumerate(parts):
            try:
                part = (folder / id).open("rb")
            except FileNotFoundError:
                place = f"part_ids.{at}"
                message = f"The upload has no part {id}."
                raise ApiError(400, message, param=place, code="invalid_value") from None
            with part:
                while piece := part.read(_PIECE):
                    file.write(piece)
                    digest.update(piece)
                    written += len(piece)
                    if written > size:
                        break
            if written > size:
                break
        if written != size:
            message = f"The parts have {'more' if written > size else written} bytes; {size} were announced."
            raise ApiError(400, message, param="part_ids", code="invalid_value")
        if md5 is not None and md5.lower() != digest.hexdigest():
            raise ApiError(400, "The file's MD5 is another.", param="md5", code="invalid_value")
        file.flush()
        os.fsync(file.fileno())


def _shown(upload: UploadRecord, file: File | None = None) -> UploadObject:
    return UploadObject(
        id=upload.id,
        bytes=upload.size,
        created_at=upload.created,
        expires_at=upload.expires,
        filename=upload.filename,
        purpose=upload.purpose,
        status=upload.status,  # type: ignore[arg-type]
        file=None if file is None else shown_file(file),
    )
