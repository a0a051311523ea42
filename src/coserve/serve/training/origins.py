"""A job's own files of the adapters that it begins with or learns from: hard links.

So an adapter stays with a job that waits, trains, or continues in another engine, even if it is deleted,
expires, or other weights are saved at its path.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal, get_args

from coserve.adapters.folder import CONFIG, WEIGHTS
from coserve.serve.adapter_registry.catalog import Catalog, Model
from coserve.serve.store.durable import link_files
from coserve.serve.store.records import JobRecord
from coserve.serve.store.store import Store

Origin = Literal["start", "teacher"]
_ORIGINS: Final[tuple[Origin, ...]] = get_args(Origin)
_CHECKPOINTS: Final = 2  # from which a job goes on: the newest, and one in case that is damaged


def origin_folder(store: Store, job: str, origin: Origin) -> Path:
    """Folder of a job's own files of an adapter."""
    return store.job_folder(job) / origin


def origins_present(store: Store, job: JobRecord) -> list[Path]:
    """Folders that a job has for the adapters that it begins with or learns from."""
    named: Mapping[Origin, str | None] = {"start": job.start_from, "teacher": job.options.get("teacher")}
    return [origin_folder(store, job.id, origin) for origin, id in named.items() if id is not None]


@asynccontextmanager
async def origins_of(
    catalog: Catalog, store: Store, job: JobRecord, start: Model, teacher: Model | None
) -> AsyncIterator[None]:
    """Context in which a job is added, and has the files of these adapters. Adapters that the operator shares
    stay where they are.

    Where the context ends with an error and without the job, the files go. While it is cancelled the job may
    still be added: then `sweep_origins` decides. Raises ApiError 404 for an adapter whose deletion has begun,
    and OSError.
    """
    given: Mapping[Origin, Model | None] = {"start": start, "teacher": teacher}
    try:
        for origin, model in given.items():
            if model is not None:
                await _take(catalog, store, origin_folder(store, job.id, origin), model)
        yield
    except asyncio.CancelledError:
        raise
    except BaseException:
        if await store.jobs.get(job.tenant, job.id) is None:
            await drop_origins(store, job.id)
        raise


async def _take(catalog: Catalog, store: Store, folder: Path, model: Model) -> None:
    adapter = model.adapter
    if adapter is None or adapter.path.is_absolute():
        return
    with catalog.use(model):
        source = await store.artifacts.get(store.folder_of(adapter))
        await asyncio.to_thread(link_files, source, folder, (CONFIG, WEIGHTS))
        await store.artifacts.put(folder)


async def drop_origins(store: Store, job: str) -> None:
    """Deletes the files that a job began with, as it is over or was never added."""
    for origin in _ORIGINS:
        await store.artifacts.discard(origin_folder(store, job, origin))


async def sweep_origins(store: Store) -> None:
    """Deletes such files of all jobs but unfinished ones. No job may be being added."""
    unfinished = {job.id for job in await store.jobs.unfinished()}

    def sweep() -> None:
        for folder in (store.folder / "jobs").iterdir():
            if folder.name not in unfinished:
                _drop(folder)

    await asyncio.to_thread(sweep)


def _drop(job: Path) -> None:
    for origin in _ORIGINS:
        shutil.rmtree(job / origin, ignore_errors=True)


async def bring_artifacts(store: Store, job: JobRecord) -> None:
    """Brings a job's data, the adapters that it begins with or learns from, and its newest checkpoints.
    Raises StateError where the artifact store is away."""
    async for path in _paths(store, job):
        await store.artifacts.get(path)


async def artifacts_are_here(store: Store, job: JobRecord) -> bool:
    """Tells whether `bring_artifacts` has nothing to bring."""
    return all([store.artifacts.is_here(path) async for path in _paths(store, job)])


async def _paths(store: Store, job: JobRecord) -> AsyncIterator[Path]:
    for id in (job.training_file, job.validation_file):
        if id is not None and (file := await store.files.get(job.tenant, id)) is not None:
            yield store.file_path(file)
    for folder in origins_present(store, job):
        yield folder
    for checkpoint in (await store.job_history.all_checkpoints(job.id))[-_CHECKPOINTS:]:
        yield store.folder_of(checkpoint)
