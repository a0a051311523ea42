"""Bodies of jobs as settings, with "auto" resolved, and the other way round."""

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
from coserve.serve.store.records import JobRecord
from coserve.train.lengths import CUT_PROMPT

_USUAL_RATE: Final = 2e-4  # for adapters of models with this width:
_USUAL_WIDTH: Final = 4096
_EPOCHS: Final = 3
_FEWEST, _MOST = 100, 25_000  # examples that should pass in all, repeated ones counted each time
_MOST_EPOCHS: Final = 25
_STEPS: Final = 100  # least optimizer steps of a job
_LARGEST_BATCH: Final = 32
_MOST_CHECKPOINTS: Final = 100  # of one job, whose weights stay on the disk
# Of a reinforcement's hyperparameters those that the engine knows by other names, or not at all.
_OPENAIS: Final = frozenset({"compute_multiplier", "eval_interval", "eval_samples", "reasoning_effort"})
_GROUP: Final = 8  # answers to a prompt
# Of the optimizer's fields those that are not TrainingConfig's.
_OTHERS: Final = frozenset({
    "learning_rate", "gradient_accumulation_steps", "save_steps", "load_best_model_at_end",
    "early_stopping_patience", "early_stopping_threshold",
})  # fmt: skip
# Of the optimizer's fields those whose null is a value of its own.
_NULL: Final = frozenset({"max_grad_norm"})


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


def configuration_of(job: JobRecord) -> JobRequest:
    """The body of a job with every "auto" and every default of the server replaced by what was chosen, also
    the seed. Of two settings that exclude each other there is the one that was asked for."""
    optimizer = OptimizerSettings.model_validate(job.optimizer or {})
    method = method_used(job)
    hyperparameters = method[method["type"]]["hyperparameters"]
    settings = optimizer.model_dump()
    if optimizer.learning_rate is not None:
        del hyperparameters["learning_rate_multiplier"]
    if "compute_multiplier" in hyperparameters and "group_size" in hyperparameters:
        del hyperparameters["compute_multiplier"]
    if hyperparameters.get("eval_interval", "auto") == "auto":
        hyperparameters.pop("eval_interval", None)
        settings["save_steps"] = job.every
    settings.pop("warmup_ratio" if optimizer.warmup_steps else "warmup_steps")
    if optimizer.early_stopping_patience is None:
        del settings["early_stopping_threshold"]
    body: dict[str, Any] = {
        "model": job.model,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "suffix": job.suffix,
        "seed": job.seed,
        "method": method,
        "metadata": job.labels,
        "integrations": job.integrations,
        "peft": job.peft,
        "optimizer": {name: value for name, value in settings.items() if value is not None or name in _NULL},
    }
    return JobRequest.model_validate({name: value for name, value in body.items() if value is not None})
