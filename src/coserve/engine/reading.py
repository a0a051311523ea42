"""Reads a job's data for its objective."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

from coserve.errors import ConfigError
from coserve.jobs import datasets
from coserve.jobs.limits import LIMITS, ReadLimits
from coserve.text import Text
from coserve.train.config import TrainingConfig
from coserve.train.example import Example, Prepared, prepare, prepare_examples
from coserve.train.labelled import TokenAnswer, prepare_labelled
from coserve.train.objectives import KTO, Distillation, Objective, Reinforcement, Supervised
from coserve.train.pairs import TokenPair, prepare_pairs
from coserve.train.prompts import TokenPrompt, prepare_prompts

Tokens = Sequence[Example] | Sequence[TokenPair] | Sequence[TokenAnswer] | Sequence[TokenPrompt]
Data = str | Path | Sequence[Mapping[str, Any]] | Tokens
_NO_TOKENIZER = "training on text needs a tokenizer, and the engine was given none"


def read_data(
    data: Data,
    training: TrainingConfig,
    objective: Objective,
    text: Text | None,
    most: int | None = None,
    limits: ReadLimits = LIMITS,
) -> Prepared:
    """Reads and tokenizes a file or records in memory; with `most` the beginning alone (`datasets.read`).
    Raises DataError, and ConfigError where there is text and no tokenizer."""
    is_tokens = _is_tokens(data)
    if text is None and not is_tokens:
        raise ConfigError(_NO_TOKENIZER)
    reads = _reader(objective)
    given: Iterable[Any] = (
        islice(cast(Tokens, data), most)
        if is_tokens
        else reads(cast(datasets.Source, data), most=most, limits=limits)
    )
    tokenizer, special = (None, False) if text is None else (text.tokenizer, text.allow_special_tokens)
    match objective:
        case Supervised() | Distillation():
            if is_tokens:
                return prepare_examples(given, training.max_length)
            assert tokenizer is not None, "checked above"
            prepared = prepare(given, tokenizer, training.loss_on, training.max_length, special)
        case Reinforcement():
            prepared = prepare_prompts(given, tokenizer, objective.grader, training.max_length, special)
        case KTO():
            prepared = prepare_labelled(given, tokenizer, training.max_length, special)
        case _:
            prepared = prepare_pairs(given, tokenizer, training.max_length, special)
    return (
        replace(prepared, ignored=tuple(given.ignored)) if isinstance(given, datasets.Records) else prepared
    )


def _reader(objective: Objective) -> Callable[..., datasets.Records[Any]]:
    match objective:
        case Supervised() | Distillation():
            return datasets.read
        case Reinforcement():
            return datasets.read_prompts
        case KTO():
            return datasets.read_labelled
        case _:
            return datasets.read_preferences


def _is_tokens(data: Data) -> bool:
    if isinstance(data, str | Path) or not isinstance(data, Sequence) or not data:
        return False
    return isinstance(data[0], Example | TokenPair | TokenAnswer | TokenPrompt)
