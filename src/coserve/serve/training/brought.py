"""A job's files, brought to the server that trains it: it may go on with what another one has begun."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from coserve.serve.store.records import JobRecord
from coserve.serve.store.store import Store
from coserve.serve.training.origins import origins_present

_CHECKPOINTS: Final = 2  # from which a job goes on: the newest, and one in case that is damaged


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
