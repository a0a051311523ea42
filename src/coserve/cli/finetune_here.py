"""`coserve finetune --base`: trains an adapter in this process, on linears that base executors compute."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coserve.errors import ConfigError, WeightsUnreadable

if TYPE_CHECKING:
    from coserve.engine.finetuning import FineTuning
    from coserve.train.config import TrainingConfig

_AGAIN_SECONDS: Final = 0.25


def finetune_here(
    file: Path,
    model: str | None,
    access: Mapping[str, Any],
    output: Path | None,
    server: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
    peft: Mapping[str, Any],
    optimizer: Mapping[str, Any],
) -> None:
    """Trains on `file` and writes the adapter to the folder `output`. `hyperparameters` and `optimizer` are
    those of a job, `access` settings of an engine that begin with "base"; `server` are flags that only a
    server knows. Raises ConfigError and what training does."""
    if "base" not in access or output is None or model is None:
        raise ConfigError("to train without a server --base, --model (a folder) and --output are needed")
    if server:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in server)
        raise ConfigError(f"{flags}: not with --base, which trains without a server")
    if output.is_file() or not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: expected a folder in one that exists")
    from transformers.utils import logging as transformers_logging

    from coserve.adapters.settings import settings_of
    from coserve.config import EngineConfig
    from coserve.engine.engine import Engine

    methods = settings_of(peft)
    transformers_logging.disable_progress_bar()
    engine = Engine(model, EngineConfig(**access, calibrate=False))
    config = _config(len(engine.prepare(file).examples), engine.base.hidden_size, hyperparameters, optimizer)
    job = engine.finetune(file, "adapter", methods, config)
    _watch(job)
    engine.save_adapter("adapter", output)
    print(output)


def _config(
    examples: int, width: int, hyperparameters: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> "TrainingConfig":
    """The settings of a job with these fields, "auto" resolved as a server does."""
    from coserve.adapters.settings import convert
    from coserve.serve.training.recipe import auto_batch_size, auto_epochs, usual_rate
    from coserve.train.config import TrainingConfig

    epochs = hyperparameters.get("n_epochs", auto_epochs(examples))
    options = {
        "epochs": epochs,
        "batch_size": hyperparameters.get("batch_size", auto_batch_size(examples, epochs)),
        "learning_rate": usual_rate(width) * hyperparameters.get("learning_rate_multiplier", 1.0),
        "seed": hyperparameters.get("seed", 0),
    }
    return convert({**options, **optimizer}, TrainingConfig, "--optimizer")


def _watch(job: "FineTuning") -> None:
    """Shows each optimizer step; waits while executors are away."""
    said = ""
    while True:
        try:
            for step in job:
                said = ""
                print(f"step {step.step}/{job.steps}  loss {step.loss:.4f}", flush=True)
            return
        except WeightsUnreadable as error:
            if str(error) != said:
                said = str(error)
                print(f"waiting: {error}", file=sys.stderr, flush=True)
            time.sleep(_AGAIN_SECONDS)
