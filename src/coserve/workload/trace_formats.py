"""Files of recorded traces: Azure's, Mooncake's and BurstGPT's, told apart by their first line.

- Azure (AzurePublicDataset, 2023 and 2024): CSV with TIMESTAMP (a date), ContextTokens, GeneratedTokens.
- BurstGPT: CSV with Timestamp (seconds), Model, Request tokens, Response tokens, ...
- Mooncake (FAST25): JSONL with timestamp (milliseconds), input_length, output_length, hash_ids (ids of the
  prompt's blocks of 512 tokens; equal beginnings have equal ids).
"""

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from coserve.errors import DataError

BLOCK: Final = 512  # tokens of a Mooncake block
MOST_TOKENS: Final = 1 << 24  # of a prompt or an answer: more than any model has positions
_LATEST: Final = 1e11  # seconds since 1970: three thousand years


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A request of a recorded trace: seconds since the first one, tokens in, tokens out, and where a trace
    has them the ids of its prompt's blocks of `BLOCK` tokens."""

    at: float
    prompt: int
    answer: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Fields:
    """Fields of a format, in order: the time, tokens in, tokens out; and how a time becomes seconds."""

    at: str
    prompt: str
    answer: str
    seconds: Callable[[Any], float]


def _date(text: str) -> float:
    """Seconds of a date, in UTC where it has no other zone."""
    date = datetime.fromisoformat(text.strip())
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


_AZURE: Final = _Fields("TIMESTAMP", "ContextTokens", "GeneratedTokens", _date)
_BURST: Final = _Fields("Timestamp", "Request tokens", "Response tokens", float)
_MOONCAKE: Final = _Fields("timestamp", "input_length", "output_length", lambda value: float(value) / 1000)


def read_trace(path: str | Path) -> list[TraceRow]:
    """The requests of a trace in one of the three formats. Raises DataError with file, line and field for a
    field that is missing or no number, and where times go backwards."""
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.read(1)
            file.seek(0)
            records = _lines_of_json(path, file) if first == "{" else _lines_of_csv(path, file)
            rows = [*_rows(path, records)]
    except OSError as error:
        raise DataError(f"{path}: expected a trace: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected text in UTF-8: {error}") from error
    if not rows:
        raise DataError(f"{path}: expected a trace with at least one request, found none")
    return rows


Record = tuple[int, _Fields, Mapping[str, Any]]


def _lines_of_csv(path: Path, file: Any) -> Iterator[Record]:
    reader = csv.DictReader(file)
    try:
        names = reader.fieldnames or ()
        fields = next((one for one in (_AZURE, _BURST) if one.at in names), None)
        if fields is None:
            raise DataError(
                f"{path}, line 1: expected the columns of a trace ({_AZURE.at}, {_AZURE.prompt} and "
                f"{_AZURE.answer}, or {_BURST.at}, {_BURST.prompt} and {_BURST.answer}), got "
                f"{', '.join(names)}"
            )
        for record in reader:
            yield reader.line_num, fields, record
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num + 1}: expected CSV: {error}") from error


def _lines_of_json(path: Path, file: Any) -> Iterator[Record]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            yield line, _MOONCAKE, msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise DataError(f"{path}, line {line}: expected a JSON object: {error}") from error


def _rows(path: Path, records: Iterator[Record]) -> Iterator[TraceRow]:
    first = before = None
    for line, fields, record in records:
        place = f"{path}, line {line}"
        at = _time(place, fields, record.get(fields.at))
        if before is not None and at < before:
            raise DataError(
                f"{place}: {fields.at} goes backwards: {record[fields.at]} comes {before - at:g} s before "
                "the line above"
            )
        first, before = at if first is None else first, at
        prompt, answer = (_tokens(place, name, record.get(name)) for name in (fields.prompt, fields.answer))
        yield TraceRow(at - first, prompt, answer, _blocks(place, prompt, record.get("hash_ids", ())))


def _time(place: str, fields: _Fields, value: Any) -> float:
    try:
        found = fields.seconds(value)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{place}: expected {fields.at} to be a time, got {value!r}") from error
    if not abs(found) <= _LATEST:
        raise DataError(f"{place}: expected {fields.at} to be a time, got {value!r}")
    return found


def _tokens(place: str, name: str, value: Any) -> int:
    """A number of tokens, at least one. A request without an answer is one that failed."""
    try:
        found = int(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{place}: expected {name} to be a number of tokens, got {value!r}") from error
    if found < 1 or isinstance(value, bool) or (isinstance(value, float) and value != found):
        raise DataError(f"{place}: expected {name} to be a number of tokens, at least one, got {value!r}")
    if found > MOST_TOKENS:
        raise DataError(f"{place}: expected {name} to be at most {MOST_TOKENS:,} tokens, got {value!r:.40}")
    return found


def _blocks(place: str, prompt: int, value: Any) -> tuple[int, ...]:
    if not value:
        return ()
    if (
        not isinstance(value, list)
        or not all(type(one) is int for one in value)
        or len(value) * BLOCK < prompt
    ):
        raise DataError(
            f"{place}: expected hash_ids to be an id for each {BLOCK} of the {prompt} tokens, got "
            f"{value!r:.60}"
        )
    return tuple(value)
