"""Reads a job's data for its objective."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

from coserve.errors import ConfigError
from coserve.jobs import datasets
from coserve.jobs.limits import LIMITS, ReadLimits
from coserve.text import Text
from coserve.train.config import TrainingConfig
from coserve.train.example import Example, Prepared
from coserve.train.labelled import TokenAnswer, prepare_labelled
from coserve.train.lengths import USUAL_NAMES, LengthLimit, Names
from coserve.train.objectives import KTO, Distillation, Objective, Reinforcement, Supervised
from coserve.train.pairs import TokenPair, prepare_pairs
from coserve.train.prompts import TokenPrompt, prepare_prompts
from coserve.train.records import prepare, prepare_examples

Tokens = Sequence[Example] | Sequence[TokenPair] | Sequence[TokenAnswer] | Sequence[TokenPrompt]
Data = str | Path | Sequence[Mapping[str, Any]] | Tokens
_NO_TOKENIZER = "training on text needs a tokenizer, and the engine was given none"


@dataclass(frozen=True, slots=True)
class Reading:
    """The extent of reading training data: all of it, or with `most` the beginning alone, at most so many
    records and what can be read in `seconds`. Errors call the source `name`, by default its file's, and
    settings by their `names`. Of the model's positions virtual tokens and answers take `reserved`. One that
    `tolerates` leaves out examples that are too long where they would be refused, and all of them if need
    be."""

    most: int | None = None
    seconds: float = datasets.BEGINNING_SECONDS
    name: str | None = None
    names: Names = USUAL_NAMES
    reserved: int = 0
    tolerates: bool = False


def read_data(
    data: Data,
    training: TrainingConfig,
    objective: Objective,
    text: Text | None,
    limit: LengthLimit = LengthLimit(),
    reading: Reading = Reading(),
    limits: ReadLimits = LIMITS,
) -> Prepared:
    """Reads and tokenizes a file or records in memory, and applies the limit to their lengths. Raises
    DataError, and ConfigError where there is text and no tokenizer."""
    is_tokens = _is_tokens(data)
    if text is None and not is_tokens:
        raise ConfigError(_NO_TOKENIZER)
    reads, most = _reader(objective), reading.most
    given: Iterable[Any] = (
        islice(cast(Tokens, data), most)
        if is_tokens
        else reads(cast(datasets.Source, data), reading.name, most, limits, reading.seconds)
    )
    tokenizer, special = (None, False) if text is None else (text.tokenizer, text.allow_special_tokens)
    match objective:
        case Supervised() | Distillation():
            if is_tokens:
                return prepare_examples(given, limit)
            assert tokenizer is not None, "checked above"
            prepared = prepare(given, tokenizer, training.loss_on, limit, special)
        case Reinforcement():
            prepared = prepare_prompts(given, tokenizer, objective.grader, limit, special)
        case KTO():
            prepared = prepare_labelled(given, tokenizer, limit, special)
        case _:
            prepared = prepare_pairs(given, tokenizer, limit, special)
    if not isinstance(given, datasets.Records):
        return prepared
    seen = given.seen
    return replace(
        prepared,
        ignored=tuple(seen.ignored),
        is_whole=given.is_whole,
        container=seen.container,
        format=seen.format,
    )


def _reader(objective: Objective) -> datasets.RecordReader[Any]:
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
