"""`coserve finetune --base` and `--tensor-parallel`: trains an adapter without a server, on linears that base
executors compute, or on ranks of its own."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coserve.cli.options import FLAGS, in_flags
from coserve.errors import ConfigError, DataError, ValidationDataError, WeightsUnreadable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coserve.engine.engine import Engine
    from coserve.engine.finetuning import FineTuning
    from coserve.engine.reading import Reading
    from coserve.engine.scoring import Scoring
    from coserve.train.config import TrainingConfig
    from coserve.train.example import Example, Prepared
    from coserve.train.objectives import Objective

_AGAIN_SECONDS: Final = 0.25
_NAME: Final = "adapter"
_PLACES: Final = ("base", "tensor_parallel", "pipeline_parallel")  # where linears are computed


@dataclass(frozen=True, slots=True)
class JobHere:
    """The arguments of the command. `access` are settings of an engine, of its base or of its ranks,
    `hyperparameters` and `optimizer` those of a job, `objective` its training method's type and settings;
    `validation` are examples that are only measured, and `server` flags that only a server knows."""

    file: Path
    model: str | None
    output: Path | None
    access: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]
    peft: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    objective: Mapping[str, Any]
    validation: Path | None
    server: Mapping[str, Any]
    check: bool = False

    @property
    def seed(self) -> int:
        return int(self.hyperparameters.get("seed", 0))

    def checked(self) -> tuple[str, Path]:
        """The model and the output. Raises ConfigError for flags that do not go together."""
        output = Path() if self.check else self.output
        if self.access.keys().isdisjoint(_PLACES) or output is None or self.model is None:
            raise ConfigError(
                "to train without a server --base or --tensor-parallel or --pipeline-parallel, --model (a "
                "folder) and --output are needed"
            )
        if self.server:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in self.server)
            places = " and ".join(f"--{name.replace('_', '-')}" for name in _PLACES if name in self.access)
            raise ConfigError(f"{flags}: not with {places}, which trains without a server")
        if output.is_file() or not output.absolute().parent.is_dir():
            raise ConfigError(f"--output {output}: expected a folder in one that exists")
        kind = self.objective.get("type", "supervised")
        if self.validation is not None and kind != "supervised":
            raise ConfigError(f"--validation-file is for supervised jobs; this one is of the type {kind}")
        return self.model, output


def finetune_here(asked: JobHere) -> None:
    """Trains, and writes the adapter to the folder `output`. Raises ConfigError and what training does."""
    model, output = asked.checked()
    from transformers.utils import logging as transformers_logging

    from coserve.adapters.settings import settings_of
    from coserve.config import EngineConfig
    from coserve.engine.engine import Engine
    from coserve.train.fresh import sketch_adapter
    from coserve.train.objectives import objective_of

    methods, config = settings_of(asked.peft), EngineConfig(**asked.access, calibrate=False)
    objective = objective_of(asked.objective, config.grader_hosts)
    transformers_logging.disable_progress_bar()
    engine = Engine(model, config)
    virtual = sketch_adapter(engine.base, _NAME, methods, asked.seed).virtual.count
    prepared, training = _prepared(engine, asked, objective, virtual)
    examples = () if asked.validation is None else _validation(engine, asked.validation, training, virtual)
    job = engine.finetune(prepared, _NAME, methods, training, objective=objective)
    _Watch(engine, job, examples, training.epochs).run()
    engine.adapters.save(_NAME, output)
    print(output)


def check_here(asked: JobHere) -> dict[str, Any]:
    """A validation of the job, as a server gives it. Raises ConfigError."""
    model, _ = asked.checked()
    from transformers.utils import logging as transformers_logging

    from coserve.config import EngineConfig
    from coserve.engine.engine import Engine
    from coserve.engine.preview import judge, read_preview
    from coserve.jobs.datasets import count
    from coserve.jobs.limits import limits_of
    from coserve.serve.training.told import told_preview
    from coserve.wire.messages import JobSpec

    config = EngineConfig(**asked.access, calibrate=False)
    transformers_logging.disable_progress_bar()
    engine = Engine(model, config)
    records = None
    with suppress(DataError):  # which the preview tells
        records = count(asked.file, asked.file.name, limits_of(config))
    options = _options(engine, asked, records or 1)
    spec = JobSpec(
        _NAME, str(asked.file), "", options, dict(asked.peft), dict(asked.objective),
        validation=None if asked.validation is None else str(asked.validation), data_name=asked.file.name,
        validation_name=None if asked.validation is None else asked.validation.name,
    )  # fmt: skip
    preview = judge(engine, *read_preview(engine, spec, records))
    fault = preview.fault
    return {
        "valid": fault is None,
        "error": None if fault is None else {"code": fault.kind, "message": in_flags(fault.text)},
        "model": model,
        "filename": asked.file.name,
        **told_preview(preview, records, options.get("too_long", "error")),
    }


def _prepared(
    engine: "Engine", asked: JobHere, objective: "Objective", virtual: int
) -> "tuple[Prepared, TrainingConfig]":
    """The data of a job for an adapter with so many virtual tokens, and its settings."""
    from coserve.adapters.settings import convert
    from coserve.train.config import TrainingConfig
    from coserve.train.job import answer_tokens

    options = _options(engine, asked, 1)
    reading = _reading(virtual + answer_tokens(objective))
    prepared = engine.prepare(asked.file, convert(options, TrainingConfig, "--optimizer"), objective, reading)
    options = _options(engine, asked, len(prepared.examples) // objective.group)
    return prepared, convert(options, TrainingConfig, "--optimizer")


def _options(engine: "Engine", asked: JobHere, units: int) -> dict[str, Any]:
    """Fields of TrainingConfig for a job with so many examples, "auto" resolved as a server does."""
    from coserve.serve.routes.job_bodies import auto_batch_size, auto_epochs, usual_rate

    given = asked.hyperparameters
    epochs = given.get("n_epochs", auto_epochs(units))
    return {
        "epochs": epochs,
        "batch_size": given.get("batch_size", auto_batch_size(units, epochs)),
        "learning_rate": usual_rate(engine.base.hidden_size) * given.get("learning_rate_multiplier", 1.0),
        "seed": asked.seed,
        **asked.optimizer,
    }


def _reading(reserved: int) -> "Reading":
    """The reading of files for this command: errors name its flags."""
    from coserve.engine.reading import Reading
    from coserve.train.lengths import Names

    return Reading(names=Names(FLAGS["optimizer.max_length"], FLAGS["optimizer.too_long"]), reserved=reserved)


def _validation(
    engine: "Engine", file: Path, training: "TrainingConfig", virtual: int
) -> "Sequence[Example]":
    """Examples of a validation file, read before anything is trained. Raises ValidationDataError."""
    from coserve.engine.scoring import check_lengths

    try:
        examples = engine.prepare(file, training, reading=_reading(virtual)).examples
    except DataError as error:
        raise ValidationDataError(f"validation {error}") from error
    check_lengths(engine, examples, virtual)
    return examples


class _Watch:
    """Drives a job, shows its steps, and after each epoch the loss on validation examples."""

    def __init__(
        self, engine: "Engine", job: "FineTuning", examples: "Sequence[Example]", epochs: int
    ) -> None:
        self._engine, self._job, self._examples = engine, job, examples
        self._every = max(1, job.steps // epochs)
        self._is_due = False  # whether an epoch has ended whose version is not scored yet
        self._scored: tuple[int, Scoring] | None = None  # the step, and the scoring under way
        self._said = ""

    def run(self) -> None:
        """Ends with the job; waits while executors are away."""
        for work in (self._train, self._finish):
            while not self._tried(work):
                time.sleep(_AGAIN_SECONDS)

    def _tried(self, work: Callable[[], None]) -> bool:
        """Does a piece of work that goes on where it was; False where an executor is away."""
        try:
            work()
        except WeightsUnreadable as error:
            if str(error) != self._said:
                self._said = str(error)
                print(f"waiting: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def _train(self) -> None:
        for step in self._job:
            self._said = ""
            shown = "".join(f"  {name} {value:.4f}" for name, value in step.metrics.items())
            print(f"step {step.step}/{self._job.steps}  loss {step.loss:.4f}{shown}", flush=True)
            if self._examples and (step.step % self._every == 0 or step.step == self._job.steps):
                self._is_due = True
            self._score()

    def _finish(self) -> None:
        while self._score():
            self._engine.step()

    def _score(self) -> bool:
        """Shows a loss that is known now, and begins with the newest version where one is due; tells whether
        one is under way. It shares steps with training."""
        from coserve.engine.scoring import LossScoring

        if self._scored is not None and self._scored[1].advance():
            step, result = self._scored[0], self._scored[1].result
            assert result is not None and result.loss is not None, "examples have a loss"
            print(f"step {step}/{self._job.steps}  validation loss {result.loss:.4f}", flush=True)
            self._scored = None
        if self._scored is None and self._is_due:
            key, self._is_due = self._engine.adapters.bank.look(_NAME).key, False
            self._scored = self._job.history[-1].step, LossScoring(self._engine, key, self._examples)
        return self._scored is not None
