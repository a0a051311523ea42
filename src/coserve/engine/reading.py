"""Reads a job's data for its objective."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from coserve.errors import ConfigError
from coserve.jobs import datasets
from coserve.jobs.formats import LabelledRecord, PreferenceRecord, PromptRecord
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
    if isinstance(objective, Supervised | Distillation):
        if is_tokens:
            return prepare_examples(islice(cast(Sequence[Example], data), most), training.max_length)
        assert text is not None, "checked above"
        records = datasets.read(_source(data), most=most, limits=limits)
        special = text.allow_special_tokens
        return prepare(records, text.tokenizer, training.loss_on, training.max_length, special)
    tokenizer, special = (None, False) if text is None else (text.tokenizer, text.allow_special_tokens)
    if isinstance(objective, Reinforcement):
        prompts: Iterable[TokenPrompt | PromptRecord] = (
            islice(cast(Iterable[TokenPrompt], data), most)
            if is_tokens
            else datasets.read_prompts(_source(data), most=most, limits=limits)
        )
        return prepare_prompts(prompts, tokenizer, objective.grader, training.max_length, special)
    if isinstance(objective, KTO):
        answers: Iterable[TokenAnswer | LabelledRecord] = (
            islice(cast(Iterable[TokenAnswer], data), most)
            if is_tokens
            else datasets.read_labelled(_source(data), most=most, limits=limits)
        )
        return prepare_labelled(answers, tokenizer, training.max_length, special)
    pairs: Iterable[TokenPair | PreferenceRecord] = (
        islice(cast(Iterable[TokenPair], data), most)
        if is_tokens
        else datasets.read_preferences(_source(data), most=most, limits=limits)
    )
    return prepare_pairs(pairs, tokenizer, training.max_length, special)


def _source(data: Data) -> datasets.Source:
    return cast(datasets.Source, data)


def _is_tokens(data: Data) -> bool:
    if isinstance(data, str | Path) or not isinstance(data, Sequence) or not data:
        return False
    return isinstance(data[0], Example | TokenPair | TokenAnswer | TokenPrompt)
