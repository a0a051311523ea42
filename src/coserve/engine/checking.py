"""Checks whether a job could ever run here, before it is taken on."""

from itertools import islice
from pathlib import Path
from typing import Final

import torch

from coserve.adapters.files import read_adapter
from coserve.adapters.settings import convert, settings_of
from coserve.engine.engine import Engine
from coserve.engine.training import JobSpec
from coserve.errors import ConfigError
from coserve.jobs import datasets
from coserve.train.config import TrainingConfig
from coserve.train.example import prepare
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
    records = islice(datasets.read(Path(command.data)), _FIRST)
    text = engine.text
    data = prepare(records, text.tokenizer, config.loss_on, config.max_length, text.allow_special_tokens)
    engine.foresee(method if start is None else start, config)
    return JobSpec(command.job, command.job, data, method, config, start)
