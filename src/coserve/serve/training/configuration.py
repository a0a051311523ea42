"""The settled configuration of a job as the body that creates the same job again."""

from typing import Any

from coserve.serve.schema.jobs import JobRequest, OptimizerSettings
from coserve.serve.store.records import JobRecord
from coserve.serve.training.recipe import method_used


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


_NULL = {"max_grad_norm"}  # null is a value of its own there
