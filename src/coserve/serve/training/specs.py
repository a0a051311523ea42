"""The engine's description of a job: paths and settings."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from coserve.serve.store.records import CheckpointRecord, File, JobRecord
from coserve.serve.store.store import Store
from coserve.serve.store.tinker import as_adapter
from coserve.serve.training.origins import Origin, origin_folder
from coserve.wire.messages import JobSpec

# Of a job's options those that are not TrainingConfig's: the training method, and the id of who teaches.
_OF_METHOD: Final = frozenset({"objective", "teacher"})


async def spec_of(store: Store, job: JobRecord, base: str) -> JobSpec:
    """The engine's description of a job on the base of the id `base`. The path of a missing file is empty,
    and the job fails there. Files that other servers took are brought here. Raises StateError."""
    ids = (job.training_file, job.validation_file)
    files = {
        file.id: file
        for id in ids
        if id is not None and (file := await store.files.get(job.tenant, id)) is not None
    }
    data, validation = (None if id is None else files.get(id) for id in ids)
    options = {name: value for name, value in job.options.items() if name not in _OF_METHOD}
    objective = job.options.get("objective", {})
    # A job of a version without this field cut what was too long, and dropped such prompts.
    options.setdefault("too_long", "skip" if objective.get("type") == "reinforcement" else "truncate")
    wanted = job.optimizer or {}
    checkpoints = await store.job_history.all_checkpoints(job.id)
    costs = ((one.step, _cost(one.metrics)) for one in checkpoints)
    return JobSpec(
        job=job.id,
        data=await _path(store, data),
        data_name=None if data is None else data.filename,
        folder=str(store.job_folder(job.id) / "checkpoints"),
        options=options,
        objective=of_engine(objective),
        method=job.peft or {},
        start_from=await _folder_of(store, job.id, "start", job.start_from),
        teacher=await _folder_of(store, job.id, "teacher", job.options.get("teacher")),
        validation=None if job.validation_file is None else await _path(store, validation),
        validation_name=None if validation is None else validation.filename,
        every=job.every,
        keep_best=_keeps_best(wanted),
        patience=wanted.get("early_stopping_patience"),
        threshold=wanted.get("early_stopping_threshold", 0.0),
        validated={step: cost for step, cost in costs if cost is not None},
        base=base,
        attempt=store.leases.fence("job", job.id),
    )


async def _path(store: Store, file: File | None) -> str:
    return "" if file is None else str(await store.bring_file(file))


def _cost(metrics: Mapping[str, Any]) -> float | None:
    """The number of which a job's best checkpoint has the lowest; None where validation gave none."""
    reward = metrics.get("valid_reward")
    return metrics.get("valid_loss") if reward is None else -reward


def best_checkpoint(job: JobRecord, checkpoints: Sequence[CheckpointRecord]) -> int | None:
    """The step of the best of a job's checkpoints, as validation found; None where the job was not asked to
    keep that one, or none was validated."""
    if not _keeps_best(job.optimizer or {}):
        return None
    costs = {one.step: cost for one in checkpoints if (cost := _cost(one.metrics)) is not None}
    return min(costs, key=costs.__getitem__, default=None)


def _keeps_best(wanted: Mapping[str, Any]) -> bool:
    return bool(wanted.get("load_best_model_at_end")) or wanted.get("early_stopping_patience") is not None


async def _folder_of(store: Store, job: str, origin: Origin, id: str | None) -> str | None:
    """The folder of an adapter that a job begins with or learns from.

    A job without files of its own was made by an earlier version, or uses an adapter of the server's
    settings. If that has been removed, the folder is missing, and the job fails.
    """
    if id is None:
        return None
    own = await store.artifacts.get(origin_folder(store, job, origin))
    if own.is_dir():
        return str(own)
    adapter = await store.adapters.get(id)
    if adapter is None and (checkpoint := await store.tinker_checkpoints.get(id)) is not None:
        adapter = as_adapter(checkpoint)
    folder = store.adapter_folder(id) if adapter is None else store.folder_of(adapter)
    return str(await store.artifacts.get(folder))


def of_engine(objective: dict[str, Any]) -> dict[str, Any]:
    """A training method's settings as the engine takes them: a response format is a grammar there."""
    return {name: value for name, value in objective.items() if name != "response_format"}
