"""Uploads and downloads of adapters: PEFT's two files, or a zip file of both."""

import asyncio
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Form, UploadFile
from fastapi.responses import FileResponse, StreamingResponse

from coserve.adapters.folder import CONFIG, WEIGHTS
from coserve.serve.adapter_registry.archives import packed, unpack
from coserve.serve.adapter_registry.registry import base_warning, import_adapter
from coserve.serve.errors import ApiError, error_responses, not_found
from coserve.serve.http.auth import Caller
from coserve.serve.http.idempotency import KEYED
from coserve.serve.routes.models import card_of
from coserve.serve.schema.models import AdapterName, ModelCard
from coserve.serve.state import Shared, State

router = APIRouter(tags=["Adapters"])
_PIECE = 2**20
_UNUSUAL = re.compile(r"[^\w.-]+", re.ASCII)  # in a name of a file
_LONGEST_NAME = 80
Name = Annotated[AdapterName, Form(description="What to call the adapter.")]


@router.post(
    "/v1/adapters",
    responses=error_responses(409, 422),
    openapi_extra=KEYED,
    summary="Upload an adapter",
)
async def upload_adapter(
    name: Name,
    caller: Caller,
    state: Shared,
    config: UploadFile | None = None,
    weights: UploadFile | None = None,
    archive: UploadFile | None = None,
) -> ModelCard:
    """Takes an adapter in PEFT's format: `config` is its JSON, `weights` its safetensors; or both in an
    `archive`, a zip file. It stays until it is deleted."""
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=state.store.folder / "adapters", prefix="."))
    most = state.settings.max_file_bytes
    try:
        if archive is not None and config is None and weights is None:
            await state.adapters.run(caller.id, unpack, archive.file, folder, most)
        elif archive is None and config is not None and weights is not None:
            for upload, file in ((config, CONFIG), (weights, WEIGHTS)):
                await _receive(upload, folder / file, most)
        else:
            message = "Send the files 'config' and 'weights', or both in one zip file as 'archive'."
            raise ApiError(422, message, param="archive")
        adapter = await import_adapter(state, caller, name, folder)
        warning = await asyncio.to_thread(base_warning, state, adapter)
    finally:  # in the tenant's next turn: unpacking goes on where the request was cancelled
        await state.adapters.run(caller.id, partial(shutil.rmtree, ignore_errors=True), folder)
    card = card_of(state, await state.catalog.find(caller, name))
    return card.model_copy(update={"warning": warning})


@router.get(
    "/v1/adapters/{name:path}/archive",
    responses=error_responses(404),
    response_class=StreamingResponse,
    summary="Download an adapter as a zip file",
)
async def download_archive(name: str, caller: Caller, state: Shared) -> StreamingResponse:
    """PEFT's two files in one archive, which `POST /v1/adapters` takes again."""
    pieces = packed((await _part_of(state, caller, name, WEIGHTS)).parent)
    try:
        await asyncio.to_thread(next, pieces)  # has both files opened
    except OSError as error:
        raise _gone(name) from error
    file = _UNUSUAL.sub("-", name.rpartition("/")[2])[:_LONGEST_NAME] or "adapter"
    given = {"Content-Disposition": f'attachment; filename="{file}.zip"'}
    return StreamingResponse(pieces, media_type="application/zip", headers=given)


@router.get(
    "/v1/adapters/{name:path}/config",
    responses=error_responses(404),
    response_class=FileResponse,
    summary="Download an adapter's configuration",
)
async def download_config(name: str, caller: Caller, state: Shared) -> FileResponse:
    """PEFT's adapter_config.json."""
    return FileResponse(await _part_of(state, caller, name, CONFIG), filename=CONFIG)


@router.get(
    "/v1/adapters/{name:path}/weights",
    responses=error_responses(404),
    response_class=FileResponse,
    summary="Download an adapter's weights",
)
async def download_weights(name: str, caller: Caller, state: Shared) -> FileResponse:
    """PEFT's adapter_model.safetensors."""
    return FileResponse(await _part_of(state, caller, name, WEIGHTS), filename=WEIGHTS)


async def _part_of(state: State, caller: Caller, name: str, part: str) -> Path:
    model = await state.catalog.find(caller, name)
    if model.folder is None:
        raise not_found(f"The model '{name}' is the base: it has no adapter.", param="name")
    path = await state.store.artifacts.get(model.folder) / part
    if not await asyncio.to_thread(path.is_file):  # deleted a moment ago, by the server or by hand
        raise _gone(name)
    return path


def _gone(name: str) -> ApiError:
    return not_found(f"The files of '{name}' are gone.", param="name")


async def _receive(upload: UploadFile, target: Path, most: int) -> None:
    """Writes an upload to `target`. Raises ApiError 413 for one that is too large."""
    left = most
    with target.open("xb") as file:
        while piece := await upload.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise ApiError(413, f"{target.name} is larger than {most} bytes.", code="file_too_large")
            await asyncio.to_thread(file.write, piece)
