"""Reads the files of a server's job: its data, its start, its newest checkpoint, its validation file."""

from dataclasses import replace
from pathlib import Path

from coserve.adapters.bypass import exact_type
from coserve.engine.checking import prepare_job, read_validation
from coserve.engine.engine import Engine
from coserve.engine.finetuning import PreparedJob
from coserve.train.checkpoint import newest_checkpoint, read_checkpoint
from coserve.wire.messages import JobSpec


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
