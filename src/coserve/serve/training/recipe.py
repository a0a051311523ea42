"""Translates a job into the engine's settings, with "auto" resolved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coserve.serve.errors import ApiError
from coserve.serve.schema.jobs import (
    DistillationMethod,
    Hyperparameters,
    JobRequest,
    OptimizerSettings,
    ReinforcementHyperparameters,
    ReinforcementMethod,
)
from coserve.serve.store.records import CheckpointRecord, File, JobRecord
from coserve.serve.store.store import Store
from coserve.serve.store.tinker import as_adapter
from coserve.serve.training.origins import Origin, origin_folder
from coserve.train.lengths import CUT_PROMPT
from coserve.wire.messages import JobSpec

_USUAL_RATE: Final = 2e-4  # for adapters of models with this width:
_USUAL_WIDTH: Final = 4096
_EPOCHS: Final = 3
_FEWEST, _MOST = 100, 25_000  # examples that should pass in all, repeated ones counted each time
_MOST_EPOCHS: Final = 25
_STEPS: Final = 100  # least optimizer steps of a job
_LARGEST_BATCH: Final = 32
_MOST_CHECKPOINTS: Final = 100  # of one job, whose weights stay on the disk
# Of a job's options those that are not TrainingConfig's: the training method, and the id of who teaches.
_OF_METHOD: Final = frozenset({"objective", "teacher"})
# Of a reinforcement's hyperparameters those that the engine knows by other names, or not at all.
_OPENAIS: Final = frozenset({"compute_multiplier", "eval_interval", "eval_samples", "reasoning_effort"})
_GROUP: Final = 8  # answers to a prompt
# Of the optimizer's fields those that are not TrainingConfig's.
_OTHERS: Final = frozenset({
    "learning_rate", "gradient_accumulation_steps", "save_steps", "load_best_model_at_end",
    "early_stopping_patience", "early_stopping_threshold",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """A job's settings. `hyperparameters` are those that OpenAI's API shows. `options` go into
    TrainingConfig, except for the `objective` (type and settings of the training method; none of supervised
    training) and the `teacher` (the id of the adapter that teaches). `save_steps` are the optimizer steps
    between checkpoints that were asked for, under the name `save_name`."""

    hyperparameters: dict[str, Any]
    options: dict[str, Any]
    save_steps: int | None = None
    save_name: str = "optimizer.save_steps"


def recipe_of(request: JobRequest, examples: int, width: int, seed: int, continues: bool) -> Recipe:
    """The recipe for a file with this many examples, and a model whose rows have `width` numbers.

    `continues` says that an adapter is trained further.

    What "auto" chooses:

    - `n_epochs`: 3, but up to 25 where that makes fewer than 100 examples pass, and less (at least 1) where
      it makes more than 25,000. This is OpenAI's published rule.
    - `batch_size`: the largest power of two, up to 32, that leaves at least 100 optimizer steps.
    - `learning_rate_multiplier`: 1, which is a rate of 2e-4 for a width of 4096, and in inverse proportion
      for others: 1e-4 for 8192, 3.2e-3 for the embedded model's 256.

    Raises ApiError 400 where two fields contradict each other.
    """
    wanted, optimizer = _hyperparameters(request), request.optimizer or OptimizerSettings()
    if continues and request.peft is not None:
        message = "An adapter that is trained further keeps its shape: 'peft' is for new ones."
        raise ApiError(400, message, param="peft", code="invalid_value")
    epochs = auto_epochs(examples) if wanted.n_epochs == "auto" else wanted.n_epochs
    batch = auto_batch_size(examples, epochs) if wanted.batch_size == "auto" else wanted.batch_size
    rate, multiplier = _rate(wanted, optimizer, usual_rate(width))
    _check_optimizer(optimizer, request.validation_file is not None)
    if optimizer.too_long == "truncate" and request.method and request.method.type == "reinforcement":
        message = f"{CUT_PROMPT.format('optimizer.too_long')}."
        raise ApiError(400, message, param="optimizer.too_long", code="invalid_value")
    options = optimizer.model_dump(exclude=set(_OTHERS))
    examples_a_step = batch * optimizer.gradient_accumulation_steps
    options |= {"epochs": epochs, "batch_size": examples_a_step, "learning_rate": rate, "seed": seed}
    shown = {"n_epochs": epochs, "batch_size": batch, "learning_rate_multiplier": multiplier}
    if (objective := _objective(request)) is not None:
        options["objective"] = objective
    if not isinstance(wanted, ReinforcementHyperparameters):
        return Recipe(shown, options, optimizer.save_steps)
    shown |= wanted.model_dump(include={*_OPENAIS}, exclude_unset=True)
    if wanted.eval_interval == "auto":
        return Recipe(shown, options, optimizer.save_steps)
    if optimizer.save_steps is not None:
        message = "Give either 'eval_interval' or optimizer.save_steps, not both."
        raise ApiError(400, message, param="optimizer.save_steps", code="invalid_value")
    return Recipe(shown, options, wanted.eval_interval, "eval_interval")


def checkpoint_interval(recipe: Recipe, examples: int, usual: int) -> int:
    """Optimizer steps between two checkpoints of a job: `usual`, or as asked for. Raises ApiError 400 where
    that makes too many."""
    if (asked := recipe.save_steps) is None:
        return usual
    steps = -(-examples // recipe.options["batch_size"]) * recipe.options["epochs"]
    steps = min(steps, recipe.options["max_steps"] or steps)
    if asked < usual and steps > asked * _MOST_CHECKPOINTS:
        least = min(usual, -(-steps // _MOST_CHECKPOINTS))
        name = recipe.save_name.rpartition(".")[2]
        message = (
            f"'{name}' of {asked} makes {-(-steps // asked)} checkpoints in {steps} steps, and a job may "
            f"have {_MOST_CHECKPOINTS}: give {least} or more."
        )
        raise ApiError(400, message, param=recipe.save_name, code="invalid_value")
    return asked


def _check_optimizer(optimizer: OptimizerSettings, validates: bool) -> None:
    """Raises ApiError 400 where fields contradict each other or lack a validation file."""
    if {"warmup_ratio", "warmup_steps"} <= optimizer.model_fields_set and optimizer.warmup_steps:
        message = "Give either 'warmup_steps' or 'warmup_ratio', not both."
        raise ApiError(400, message, param="optimizer.warmup_steps", code="invalid_value")
    if "early_stopping_threshold" in optimizer.model_fields_set and optimizer.early_stopping_patience is None:
        message = "'early_stopping_threshold' needs 'early_stopping_patience'."
        raise ApiError(400, message, param="optimizer.early_stopping_threshold", code="invalid_value")
    for name in ("early_stopping_patience", "load_best_model_at_end"):
        if getattr(optimizer, name) and not validates:
            message = f"'{name}' needs a 'validation_file', whose loss or reward decides."
            raise ApiError(400, message, param=f"optimizer.{name}", code="invalid_value")


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
    wanted = OptimizerSettings.model_validate(job.optimizer or {})
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
        patience=wanted.early_stopping_patience,
        threshold=wanted.early_stopping_threshold,
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
    if not _keeps_best(OptimizerSettings.model_validate(job.optimizer or {})):
        return None
    costs = {one.step: cost for one in checkpoints if (cost := _cost(one.metrics)) is not None}
    return min(costs, key=costs.__getitem__, default=None)


def _keeps_best(wanted: OptimizerSettings) -> bool:
    return wanted.load_best_model_at_end or wanted.early_stopping_patience is not None


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


def auto_epochs(examples: int) -> int:
    """Epochs that "auto" chooses for `examples` examples."""
    if examples * _EPOCHS < _FEWEST:
        return min(_MOST_EPOCHS, -(-_FEWEST // examples))
    if examples * _EPOCHS > _MOST:
        return max(1, _MOST // examples)
    return _EPOCHS


def usual_rate(width: int) -> float:
    """The learning rate of a multiplier of 1.

    With Adam a step changes every weight by a similar amount, which changes sums of `width` products in
    proportion to `width`, so the rate is inversely proportional to it.
    """
    return _USUAL_RATE * _USUAL_WIDTH / width


def auto_batch_size(examples: int, epochs: int) -> int:
    """Examples of one optimizer step."""
    most = min(_LARGEST_BATCH, examples * epochs // _STEPS)
    return 1 << max(0, most.bit_length() - 1)


def _hyperparameters(request: JobRequest) -> Hyperparameters:
    settings = request.method.settings if request.method else None
    inner = settings.hyperparameters if settings else None
    if inner is not None and request.hyperparameters is not None:
        message = "Give hyperparameters either at the top or in 'method', not in both."
        raise ApiError(400, message, param="hyperparameters", code="invalid_value")
    return inner or request.hyperparameters or Hyperparameters()


def _objective(request: JobRequest) -> dict[str, Any] | None:
    """The training method with its own settings; None for supervised training."""
    method = request.method
    if method is None or method.type == "supervised":
        return None
    objective: dict[str, Any] = {"type": method.type}
    if (settings := method.settings) is not None and settings.hyperparameters is not None:
        common = {*Hyperparameters.model_fields, *_OPENAIS}
        own = settings.hyperparameters.model_dump(exclude=common, exclude_unset=True)  # null is a value
        objective |= {name: value for name, value in own.items() if value != "auto"}
    if isinstance(settings, ReinforcementMethod):
        objective["grader"] = settings.grader
        if settings.response_format is not None:
            objective["response_format"] = settings.response_format.model_dump(
                by_alias=True, exclude_none=True
            )
        hyperparameters = settings.hyperparameters
        if hyperparameters is not None and hyperparameters.compute_multiplier != "auto":
            if "group_size" in objective:
                message = "Give either 'compute_multiplier' or 'group_size', not both."
                raise ApiError(400, message, param="method", code="invalid_value")
            asked = round(_GROUP * hyperparameters.compute_multiplier)
            objective["group_size"] = max(asked, 2)
    if isinstance(settings, DistillationMethod):
        objective["teacher"] = settings.teacher
    return objective


def of_engine(objective: dict[str, Any]) -> dict[str, Any]:
    """A training method's settings as the engine takes them: a response format is a grammar there."""
    return {name: value for name, value in objective.items() if name != "response_format"}


def method_used(job: JobRecord) -> dict[str, Any]:
    """A job's training method as the API shows it."""
    objective = {**job.options.get("objective", {})}
    name = objective.pop("type", "supervised")
    objective.pop("grammar", None)
    others = ("grader", "teacher", "response_format")
    beside = {field: objective.pop(field) for field in others if field in objective}
    return {"type": name, name: {"hyperparameters": {**job.hyperparameters, **objective}, **beside}}


def _rate(wanted: Hyperparameters, optimizer: OptimizerSettings, usual: float) -> tuple[float, float]:
    """The learning rate, and its multiple of the usual one."""
    multiplier = wanted.learning_rate_multiplier
    if optimizer.learning_rate is None:
        multiplier = 1.0 if multiplier == "auto" else multiplier
        return usual * multiplier, multiplier
    if multiplier != "auto":
        message = "Give either 'learning_rate_multiplier' or optimizer.learning_rate, not both."
        raise ApiError(400, message, param="optimizer.learning_rate", code="invalid_value")
    return optimizer.learning_rate, optimizer.learning_rate / usual
