"""Reads a job's data for its objective."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from coserve.errors import ConfigError
from coserve.jobs import datasets
from coserve.text import Text
from coserve.train.config import TrainingConfig
from coserve.train.example import Example, Prepared, prepare, prepare_examples
from coserve.train.objectives import Distillation, Objective, Reinforcement, Supervised
from coserve.train.pairs import TokenPair, prepare_pairs
from coserve.train.prompts import TokenPrompt, prepare_prompts

Tokens = Sequence[Example] | Sequence[TokenPair] | Sequence[TokenPrompt]
Data = str | Path | Sequence[Mapping[str, Any]] | Tokens
_NO_TOKENIZER = "training on text needs a tokenizer, and the engine was given none"


def read_data(
    data: Data, training: TrainingConfig, objective: Objective, text: Text | None, most: int | None = None
) -> Prepared:
    """Reads and tokenizes the first `most` records of a file, or of some in memory. Raises DataError, and
    ConfigError where there is text and no tokenizer."""
    is_tokens = _is_tokens(data)
    if text is None and not is_tokens:
        raise ConfigError(_NO_TOKENIZER)
    if isinstance(objective, Supervised | Distillation):
        if is_tokens:
            return prepare_examples(islice(cast(Sequence[Example], data), most), training.max_length)
        assert text is not None, "checked above"
        records = islice(datasets.read(_source(data)), most)
        special = text.allow_special_tokens
        return prepare(records, text.tokenizer, training.loss_on, training.max_length, special)
    tokenizer, special = (None, False) if text is None else (text.tokenizer, text.allow_special_tokens)
    if isinstance(objective, Reinforcement):
        prompts = cast(Iterable[TokenPrompt], data) if is_tokens else datasets.read_prompts(_source(data))
        return prepare_prompts(
            islice(prompts, most), tokenizer, objective.grader, training.max_length, special
        )
    pairs = cast(Iterable[TokenPair], data) if is_tokens else datasets.read_preferences(_source(data))
    return prepare_pairs(islice(pairs, most), tokenizer, training.max_length, special)


def _source(data: Data) -> datasets.Source:
    return cast(datasets.Source, data)


def _is_tokens(data: Data) -> bool:
    if isinstance(data, str | Path) or not isinstance(data, Sequence) or not data:
        return False
    return isinstance(data[0], Example | TokenPair | TokenPrompt)
