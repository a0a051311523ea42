"""Prompts from a file, and adapters of unequal popularity, for the requests of a workload."""

import csv
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from coserve.errors import ConfigError, DataError

_FIELDS: Final = ("prompt", "question", "text", "messages")
_EXPECTED: Final = 'expected an object with "prompt", "question", "text" or "messages"'


def read_prompts(path: str | Path) -> list[str]:
    """Prompts of a `.csv` file with a column `prompt`, or of any other file as JSONL.

    A line of JSONL has a field prompt, question, text or messages; of messages, those before the assistant's
    last turn are the prompt. Raises DataError with file, line and what was expected.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = _csv_prompts(path, file) if path.suffix.lower() == ".csv" else _jsonl_prompts(path, file)
            found = list(lines)
    except OSError as error:
        raise DataError(f"{path}: expected a file of prompts: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected text in UTF-8: {error}") from error
    if not found:
        raise DataError(f"{path}: expected at least one prompt, found none")
    return found


def draw_by_popularity(names: Sequence[str], count: int, exponent: float, seed: int = 0) -> list[str]:
    """The adapters of `count` requests: the k-th of `names` with a weight of k ** -exponent.

    No public trace has requests' adapters, so this is synthetic (as in S-LoRA): 0 is uniform, about 1 is
    Zipf's law.
    """
    if not names or not 0 <= exponent < float("inf"):
        raise ConfigError(f"popularity needs adapters and an exponent >= 0, not {len(names)} and {exponent}")
    weights = [rank**-exponent for rank in range(1, len(names) + 1)]
    return random.Random(seed).choices(names, weights, k=count)


def _csv_prompts(path: Path, file: Any) -> Iterator[str]:
    reader = csv.DictReader(file)
    line = 1
    try:
        if "prompt" not in (reader.fieldnames or ()):
            raise DataError(f"{path}, line 1: expected a column `prompt`, got {reader.fieldnames}")
        line = reader.line_num + 1
        for record in reader:
            yield _text(record["prompt"], f"{path}, line {line}: expected a prompt")
            line = reader.line_num + 1  # a field may hold several lines: where the next record begins
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: expected CSV: {error}") from error


def _jsonl_prompts(path: Path, file: Any) -> Iterator[str]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        place = f"{path}, line {line}"
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise DataError(f"{place}: expected JSON: {error}") from error
        yield _prompt(value, place)


def _prompt(value: object, place: str) -> str:
    """The prompt of one line of JSONL."""
    if not isinstance(value, Mapping):
        raise DataError(f"{place}: {_EXPECTED}, got {type(value).__name__}")
    field = next((name for name in _FIELDS if name in value), None)
    if field is None:
        raise DataError(f"{place}: {_EXPECTED}, got {', '.join(value) or 'an empty one'}")
    if field != "messages":
        return _text(value[field], f'{place}: expected text in "{field}"')
    return _before_the_answer(value[field], f'{place}: expected "messages" to be turns with a role and text')


def _before_the_answer(messages: object, expected: str) -> str:
    if not isinstance(messages, list) or not all(isinstance(turn, Mapping) for turn in messages):
        raise DataError(f"{expected}, got {type(messages).__name__}")
    answers = [i for i, turn in enumerate(messages) if turn.get("role") == "assistant"]
    asked = messages[: answers[-1]] if answers else messages
    if not asked:
        raise DataError(f"{expected}, got none before the answer")
    return "\n".join(_text(turn.get("content"), expected) for turn in asked)


def _text(value: object, expected: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{expected}, got {'nothing' if value is None else type(value).__name__}")
    if not value.strip():
        raise DataError(f"{expected}, got nothing")
    return value
