"""Artifacts of a finished job: its adapter, copied out of its last checkpoint, and a file of its figures."""

import asyncio
import csv
import hashlib
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coserve.adapters.folder import CONFIG, WEIGHTS
from coserve.core.training import ACCURACY
from coserve.errors import AdapterError
from coserve.serve.adapter_registry.imports import copy_adapter
from coserve.serve.store.durable import write_whole
from coserve.serve.store.ids import of_attempt, tail_of
from coserve.serve.store.quotas import bytes_in
from coserve.serve.store.records import Adapter, CheckpointRecord, File, JobRecord
from coserve.serve.store.store import Store

_ACCURACY: Final = f"train_{ACCURACY}"  # in OpenAI's file it has another name than in events
_COLUMNS: Final = (
    "step", "train_loss", "train_accuracy", "valid_loss", f"valid_{ACCURACY}",
    "learning_rate", "grad_norm", "tokens", "seconds",
)  # fmt: skip
_LEFT_OUT: Final = ("total_steps", "labels", "full_valid_loss", f"full_valid_{ACCURACY}")


class Artifacts:
    """Stores the results of successful jobs. Names derive from a job's id and its lease: a second attempt
    of one server finds the first one's files, and no server changes what another one has published."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def bring_in(self, job: JobRecord, step: int) -> tuple[Adapter, File]:
        """Writes the finished adapter and the result file durably; the caller adds their rows.

        Raises AdapterError if the checkpoint of `step` is missing or damaged, OSError if the disk is full,
        and StateError where the artifact store is away.
        """
        checkpoint = await self._checkpoint(job, step)
        id = f"adapter-{tail_of(job.id)}"
        folder = self._store.adapter_folder(of_attempt(id, self._store.leases.fence("job", job.id)))
        if not folder.exists():
            trained = await self._store.artifacts.get(self._store.folder_of(checkpoint))
            await asyncio.to_thread(check, trained)
            await asyncio.to_thread(copy_adapter, trained, folder, sys.maxsize)
        await self._store.artifacts.put(folder)
        now = int(self._store.clock())
        path = self._store.path_of(folder)
        adapter = Adapter(id, job.name, path, job.base, now, job.tenant, job.model, job.id)
        adapter.bytes = await asyncio.to_thread(bytes_in, folder)
        return adapter, await self._write_results(job, now)

    async def _checkpoint(self, job: JobRecord, step: int) -> CheckpointRecord:
        for checkpoint in await self._store.job_history.all_checkpoints(job.id):
            if checkpoint.step == step:
                return checkpoint
        raise AdapterError(f"there is no checkpoint of step {step}")

    async def _write_results(self, job: JobRecord, now: int) -> File:
        fence = self._store.leases.fence("job", job.id)
        id, name = of_attempt(f"file-{tail_of(job.id)}", fence), f"step_metrics_{job.id}.csv"
        file = File(id, job.tenant, name, "fine-tune-results", 0, now, ".csv")
        lines = _csv(await self._store.job_history.metrics(job.id))
        path = self._store.file_path(file)
        size = await asyncio.to_thread(write_whole, path, lines)
        await self._store.artifacts.put(path, replace=True)
        return File(id, job.tenant, name, file.purpose, size, now, file.suffix)


def check(checkpoint: Path) -> None:
    """Compares a checkpoint's adapter with its manifest. Raises AdapterError where they differ."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_bytes())["files"]
        for name in (CONFIG, WEIGHTS):
            with (checkpoint / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != files[name]["sha256"]:
                raise AdapterError(f"{name} of the last checkpoint is damaged")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"the last checkpoint is damaged: {error}") from error


def _csv(rows: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """CSV with a header and one line for each optimizer step; its training method's figures come last."""
    further = sorted({name for row in rows for name in row} - {*_COLUMNS, *_LEFT_OUT})
    columns = (*_COLUMNS, *further)
    told = ({**row, "train_accuracy": row.get(_ACCURACY)} for row in rows)
    for values in (columns, *([row.get(name) for name in columns] for row in told)):
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(values)
        yield line.getvalue().encode()
