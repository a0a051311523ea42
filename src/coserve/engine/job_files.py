"""Reads what a server's job or session names: settings, data, start, checkpoint, validation file."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import exact_type
from coserve.adapters.files import read_adapter
from coserve.adapters.settings import convert, settings_of
from coserve.engine.engine import Engine
from coserve.engine.reading import Reading
from coserve.engine.scoring import check_lengths
from coserve.errors import AdapterError, DataError, ValidationDataError
from coserve.executors.executor import FreshAdapter, TraceLayers
from coserve.train.checkpoint import newest_checkpoint, read_checkpoint
from coserve.train.config import TrainingConfig
from coserve.train.example import Prepared
from coserve.train.fresh import sketch_adapter
from coserve.train.job import PreparedJob, answer_tokens, check_invoked, reserved_positions
from coserve.train.lengths import Names
from coserve.train.objectives import objective_of
from coserve.train.pruning.plan import foresee
from coserve.train.state import TrainingState
from coserve.wire.messages import JobSpec, OpenTraining

API_NAMES: Final = Names("optimizer.max_length", "optimizer.too_long")
_FIRST: Final = 512  # examples read: a job needs at least the bytes for a part of its data


def adapter_of(job: str) -> str:
    """Name of a job's adapter while it trains; a server refers to durable versions only."""
    return f"training:{job}"


def reference_of(job: str) -> str:
    """Name of the adapter that validation compares with a job's."""
    return f"reference:{job}"


def read_job(engine: Engine, spec: JobSpec) -> PreparedJob:
    """Reads everything a job needs; steps go on meanwhile."""
    name, base = adapter_of(spec.job), engine.base
    checkpoint = newest_checkpoint(Path(spec.folder))
    resume = None
    if checkpoint is not None:
        resume = read_checkpoint(checkpoint.path, name, base, exact_type(base.dtype))
    prepared = prepare_job(engine, spec, name, resume)
    validation, reference = read_validation(engine, spec, prepared), None
    if validation is not None and prepared.objective.has_reference and spec.start_from is not None:
        reference = engine.adapters.look_at(reference_of(spec.job), spec.start_from)
    return replace(prepared, validation=validation, checkpoint=checkpoint, validation_reference=reference)


def read_beginning(engine: Engine, spec: JobSpec) -> PreparedJob:
    """Reads the job with only the first examples of its data and of its validation. Takes no lock: steps go
    on meanwhile. Raises DataError, AdapterError or ConfigError."""
    prepared = prepare_job(engine, spec, spec.job, reading=Reading(_FIRST))
    read_validation(engine, spec, prepared, _FIRST)
    return prepared


def read_validation(
    engine: Engine, spec: JobSpec, prepared: PreparedJob, most: int | None = None
) -> Prepared | None:
    """The first `most` examples of a job's validation file, None where it has no file. Raises
    ValidationDataError for those that are of another kind than the job learns from, or too long."""
    if spec.validation is None:
        return None
    objective, virtual = prepared.objective, prepared.first.virtual.count
    sampled = answer_tokens(objective)
    reading = Reading(most, name=spec.validation_name, names=API_NAMES, reserved=virtual + sampled)
    try:
        found = engine.prepare(Path(spec.validation), prepared.config, objective, reading)
        check_invoked(found.examples, objective.group, prepared.first, prepared.reference)
    except DataError as error:
        raise ValidationDataError(f"validation {error}") from error
    check_lengths(engine, found.examples, virtual, sampled)
    return found


def prepare_job(
    engine: Engine,
    spec: JobSpec,
    adapter: str,
    resume: TrainingState | None = None,
    reading: Reading = Reading(),
) -> PreparedJob:
    """Reads a job's start for `adapter` and its data. Takes no lock: steps go on meanwhile. Raises
    AdapterError, ConfigError and DataError."""
    config, methods = convert(spec.options, TrainingConfig, "options"), settings_of(spec.method)
    objective = objective_of(spec.objective, engine.config.grader_hosts)
    first = resume.adapter if resume else _first(engine, adapter, methods, config, spec.start_from)
    compared = spec.start_from if objective.has_reference else spec.teacher
    reference = None if compared is None else _read_adapter(engine, adapter, compared)
    reserved = reserved_positions(first, reference, objective)
    reading = replace(reading, name=spec.data_name, names=API_NAMES, reserved=reserved)
    data = engine.prepare(Path(spec.data), config, objective, reading)
    check_invoked(data.examples, objective.group, first, reference)
    is_fresh = resume is None and spec.start_from is None
    prepared = PreparedJob(
        spec.job, adapter, data, methods, config, first, is_fresh, resume, objective, reference
    )
    _foresee(engine, prepared)
    return prepared


def prepare_session(engine: Engine, command: OpenTraining) -> PreparedJob:
    """Reads a session's settings and its start. Takes no lock: steps go on meanwhile. Raises AdapterError and
    ConfigError."""
    config, methods = convert(command.options, TrainingConfig, "options"), settings_of(command.method)
    first = _first(engine, command.adapter, methods, config, command.start_from)
    prepared = PreparedJob(
        command.session, command.adapter, Prepared(()), methods, config, first, command.start_from is None
    )
    _foresee(engine, prepared)
    return prepared


def _first(
    engine: Engine, adapter: str, methods: tuple[object, ...], config: TrainingConfig, folder: str | None
) -> AdapterVersion:
    """The adapter to train from, read from `folder`; a fresh one is shapes alone."""
    if folder is None:
        return sketch_adapter(engine.base, adapter, methods, config.seed)
    return _read_adapter(engine, adapter, folder)


def _read_adapter(engine: Engine, name: str, folder: str) -> AdapterVersion:
    base, path = engine.base, Path(folder)
    if not path.is_dir():
        raise AdapterError(f"the adapter {path.name!r}, which it begins with or learns from, was deleted")
    return read_adapter(path, name, base, exact_type(base.dtype), base.device)


def _foresee(engine: Engine, prepared: PreparedJob) -> None:
    """Traces which activations of a job will be stored: most of a second, once for each shape of layers.
    Takes no lock: steps go on meanwhile."""
    config = prepared.config
    foresee(engine.base, prepared.first, config.keep)  # for byte estimates in this process
    if prepared.is_fresh:
        fresh = FreshAdapter.of(prepared.methods, config.seed)
        engine.executor.call(TraceLayers(config.keep, fresh=fresh))
    else:
        engine.executor.call(TraceLayers(config.keep, start=prepared.first))
