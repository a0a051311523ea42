"""Checks whether a job could ever run here, before it is taken on."""

from itertools import islice
from pathlib import Path
from typing import Final

import torch

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import read_adapter
from coserve.adapters.settings import convert, settings_of
from coserve.engine.engine import Engine
from coserve.engine.finetuning import JobSpec
from coserve.errors import ConfigError
from coserve.executors.executor import FreshAdapter, TraceLayers
from coserve.jobs import datasets
from coserve.train.config import TrainingConfig
from coserve.train.example import prepare
from coserve.train.fresh import sketch_adapter
from coserve.train.pruning.plan import foresee
from coserve.wire.messages import CheckJob

_FIRST: Final = 512  # examples that are looked at: a job needs at least the bytes that some of its data need


def read_beginning(engine: Engine, command: CheckJob) -> JobSpec:
    """The job with the first examples of its data. Takes no lock: steps go on meanwhile. Raises DataError,
    AdapterError or ConfigError."""
    if engine.text is None:
        raise ConfigError("training on text needs a tokenizer, and the engine was given none")
    config = convert(command.options, TrainingConfig, "options")
    start = None
    if command.start_from is not None:
        exact = torch.promote_types(engine.base.dtype, torch.float32)
        start = read_adapter(Path(command.start_from), command.job, engine.base, exact, engine.base.device)
    method = settings_of(command.method)
    first = sketch_adapter(engine.base, command.job, method, config.seed) if start is None else start
    records = islice(datasets.read(Path(command.data)), _FIRST)
    text = engine.text
    data = prepare(records, text.tokenizer, config.loss_on, config.max_length, text.allow_special_tokens)
    foresee_job(engine, first, config, None if start is not None else method)
    return JobSpec(command.job, command.job, data, method, config, start)


def foresee_job(
    engine: Engine, first: AdapterVersion, training: TrainingConfig, fresh: tuple[object, ...] | None
) -> None:
    """Finds out what tapes of a job will keep that begins with an adapter, `first`, or a `fresh` one of these
    methods, of which `first` are the shapes: most of a second, once for each shape of layers. Takes no lock:
    steps go on meanwhile."""
    foresee(engine.base, first, training.keep)  # for whoever counts its bytes, here
    if fresh is None:
        engine.executor.call(TraceLayers(training.keep, start=first))
    else:
        engine.executor.call(TraceLayers(training.keep, fresh=FreshAdapter.of(fresh, training.seed)))
